"""Where a step's time and memory go, by PyTorch's profiler."""
