"""Kernels of the KV family."""
