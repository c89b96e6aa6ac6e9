"""The plain single-device transformer. Nothing in this package knows a mesh, a group or a rank."""

from ndtrain.model.transformer import Context, Ops, Segment, Transformer, dim_sizes, tensor_dims

__all__ = ["Context", "Ops", "Segment", "Transformer", "dim_sizes", "tensor_dims"]
