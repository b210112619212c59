"""Device kernels, one folder for each op family: tensors in, tensors out, no engine types."""
