"""Kernels of the sampling family."""
