"""Kernels of the MoE family."""
