"""Kernels of the spec family: the DSpark drafter."""
