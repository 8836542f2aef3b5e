"""CUDA devices for a CPU build of torch: memory, streams, events, races and counts, in host memory."""
