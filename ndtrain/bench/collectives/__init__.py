"""`bench collectives`: every collective over every axis of a mesh, checked and timed."""
