"""Meshes, sharding and collectives: what knows ranks and no model."""
