"""One file per mesh axis, and `apply`, which composes them in the one order there is."""
