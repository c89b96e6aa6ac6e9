"""Mixtures of experts on one device: tokens are routed, permuted, multiplied and combined."""
