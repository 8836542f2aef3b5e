"""Data in files too big to be held or indexed in memory, read by id: JSON lines, parquet, tar."""
