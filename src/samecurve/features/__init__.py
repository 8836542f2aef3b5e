"""Features: what only some runs have, one folder each (core/feature.py says what is in one)."""
