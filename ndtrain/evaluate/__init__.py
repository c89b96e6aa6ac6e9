"""The validation loss of a checkpoint, on any data and any mesh."""
