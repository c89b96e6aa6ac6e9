"""The attention core: tiles, their kernels, and the custom op for compiled graphs."""
