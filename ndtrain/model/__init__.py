"""The plain single-device transformer. What runs it on many devices replaces its calls and is not known here."""

from ndtrain.model.block import Context, Ops, dim_sizes
from ndtrain.model.transformer import Segment, Transformer, tensor_dims, tensor_shapes

__all__ = ["Context", "Ops", "Segment", "Transformer", "dim_sizes", "tensor_dims", "tensor_shapes"]
