"""Kernels of the compress family."""
