"""`bench peers`: training steps and attention against PyTorch's own parallelism and `transformers`."""
