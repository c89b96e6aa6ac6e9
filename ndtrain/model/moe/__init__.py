"""Mixtures of experts on one device: how tokens are routed, permuted, multiplied and combined."""
