"""Fits the rates of the planner to measurements, and says how far the predictions are off."""
