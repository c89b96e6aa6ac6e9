"""Predicts the memory, time and goodput of runs on machines that are not available, and searches their settings."""
