"""Backend for NVIDIA GPUs on Triton kernels: SM100 by design, SM90 for measuring and checking."""
