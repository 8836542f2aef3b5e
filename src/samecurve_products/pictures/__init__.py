"""Tasks that learn from pictures: vision, diffusion."""
