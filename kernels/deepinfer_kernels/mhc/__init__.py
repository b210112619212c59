"""Kernels of the mHC family."""
