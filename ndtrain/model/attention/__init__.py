"""The attention core: tiles, their kernels, and the custom op that compiled graphs hold."""
