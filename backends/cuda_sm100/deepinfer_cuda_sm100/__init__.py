"""Backend for NVIDIA GPUs of compute capability 10.0 (SM100). This version only probes."""
