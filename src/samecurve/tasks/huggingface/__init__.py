"""Models of Hugging Face's transformers, and text for them."""
