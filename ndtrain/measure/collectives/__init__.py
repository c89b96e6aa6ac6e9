"""`bench collectives`: checks and times every collective over every axis of a mesh."""
