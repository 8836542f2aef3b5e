"""A decoder that learns to continue text."""
