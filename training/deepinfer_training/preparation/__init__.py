"""From public packages to the data folder: archives, texts, tokenizer, tokens, word lists."""
