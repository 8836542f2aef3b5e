"""CUDA devices for a CPU build of torch: memory, streams, races and counts, in host memory."""
