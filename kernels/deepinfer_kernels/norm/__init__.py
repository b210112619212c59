"""Kernels of the norm family."""
