"""`bench peers`: training steps and attention, compared with PyTorch's own parallelism and `transformers`."""
