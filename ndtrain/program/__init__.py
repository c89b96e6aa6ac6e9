"""A training step as data: what a rank launches, runs and waits for, in order.

`passes` expands a row of the schedule over the rank's layers, and `build` turns the passes into a list of `ops`. The
executor runs this list. The planner predicts its time and memory.
"""
