"""The engine: requests, scheduling, steps, results."""
