"""The plain single-device transformer. What runs it on many devices replaces its calls and is not known here."""

from ndtrain.model.transformer import Context, Ops, Segment, Transformer, dim_sizes, tensor_dims, tensor_shapes

__all__ = ["Context", "Ops", "Segment", "Transformer", "dim_sizes", "tensor_dims", "tensor_shapes"]
