"""A package outside ndtrain, as a user would write it: a family, an optimizer, a source, a schedule and a callback."""
