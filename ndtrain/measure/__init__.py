"""Measuring: ranks, rounds, collectives and training steps. `bench`, `plan` and `preflight` share it."""
