"""Measurements that a command makes on any backend."""
