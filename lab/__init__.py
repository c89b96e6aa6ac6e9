"""Tools that only the makers run, from a checkout: peers, the GPU suite, and published measurements with their fit."""
