"""Trials with many ranks, in processes of this machine: what a start, a step, a save and a load cost each rank."""
