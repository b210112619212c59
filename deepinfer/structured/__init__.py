"""Structured output: the constraint interface (grammars come later)."""
