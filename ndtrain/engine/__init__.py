"""One training step and the loop around it."""
