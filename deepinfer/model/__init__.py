"""The DeepSeek-V4.1 model: configuration, parameters, and the layers written on device ops."""
