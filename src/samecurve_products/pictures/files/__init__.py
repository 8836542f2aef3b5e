"""Picture files, for every task that reads them: what is in a file, and where it lies."""
