"""Kernels of the state family."""
