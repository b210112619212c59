"""Kernels of the quant family."""
