"""Thousands of ranks in one process: what they send and open, and what the diagnosis of a hang finds."""
