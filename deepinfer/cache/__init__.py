"""KV memory: blocks and request slots, and what later prompts find of them."""
