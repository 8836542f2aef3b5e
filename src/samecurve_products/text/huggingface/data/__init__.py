"""Text and chats as rows of tokens: read, tokenized once, laid into rows. No engine is imported."""
