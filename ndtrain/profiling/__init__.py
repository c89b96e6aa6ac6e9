"""Time and memory of a step, measured with PyTorch's profiler."""
