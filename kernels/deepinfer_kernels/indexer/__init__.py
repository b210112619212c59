"""Kernels of the indexer family."""
