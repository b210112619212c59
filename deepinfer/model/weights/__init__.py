"""Checkpoints: the catalogue of tensor names, reading, writing, and random parameters."""
