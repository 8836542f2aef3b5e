"""Tasks that learn from texts: language, huggingface."""
