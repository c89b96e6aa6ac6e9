"""The transformer on a single device. Parallelism replaces some of its ops from outside."""

from ndtrain.model.block import Context, Ops, dim_sizes
from ndtrain.model.transformer import Segment, Transformer, params, tensor_dims, tensor_shapes

__all__ = ["Context", "Ops", "Segment", "Transformer", "dim_sizes", "params", "tensor_dims", "tensor_shapes"]
