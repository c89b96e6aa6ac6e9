"""Tools that only the makers run, from a checkout: peers, the GPU suite, published measurements with their fit, and
trials of islands."""
