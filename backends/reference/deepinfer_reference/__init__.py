"""The reference backend: pure PyTorch, runs anywhere, and is the oracle of the others."""
