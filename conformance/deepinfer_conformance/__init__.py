"""Checks any backend against the reference, by its name and through the public interface."""
