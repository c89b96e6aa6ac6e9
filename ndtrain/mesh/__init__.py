"""Meshes, sharding and collectives. These modules know ranks and no model."""
