"""Continues a text with a checkpoint, in one process that holds the whole model."""
