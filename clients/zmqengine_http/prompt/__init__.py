"""Messages and texts to token ids: chat templates, tokenizers, and the threads that run them."""
