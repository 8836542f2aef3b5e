"""Families of pipelines: what differs between Stable Diffusion, SDXL and flow transformers."""
