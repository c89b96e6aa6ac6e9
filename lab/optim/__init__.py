"""Trials of optimizers."""
