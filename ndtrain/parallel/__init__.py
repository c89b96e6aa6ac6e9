"""The parallel axes (fsdp, tp, cp, pp, ep), recompute, and `build.py`, which composes them for one rank."""
