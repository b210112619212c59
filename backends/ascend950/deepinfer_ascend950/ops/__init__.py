"""Op implementations by family, on torch_npu's operators and torch.

Rules of a device, which tests hold all of them to: no value is read on the host, tensors are
made on the device of the arguments, and nothing is computed in float64.
"""
