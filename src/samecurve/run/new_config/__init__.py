"""Configs for new runs: the presets to begin from."""
