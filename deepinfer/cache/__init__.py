"""KV memory: blocks and request slots."""
