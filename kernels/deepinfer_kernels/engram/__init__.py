"""Kernels of the Engram family."""
