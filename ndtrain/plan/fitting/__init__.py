"""Fits the planner's rates to measurements, and reports the errors of its predictions."""
