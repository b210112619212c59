"""Reference implementations by family; each module registers its ops on a table."""
