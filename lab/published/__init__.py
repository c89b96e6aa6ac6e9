"""Published measurements of other trainers, read as runs of ndtrain."""
