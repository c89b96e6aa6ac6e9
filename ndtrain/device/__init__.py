"""Devices: what computes a tensor, cores, memory and peak rates."""
