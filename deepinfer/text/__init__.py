"""Text and token ids: tokenizer, streaming detokenizer, stop strings."""
