"""Kernels of the attention family."""
