"""How the tiny models are made: corpus, tokenizer, conversations, training, measurements."""
