"""The transformer on a single device. Parallelism replaces some of its calls from outside."""

from ndtrain.model.transformer import Context, Ops, Segment, Transformer, dim_sizes, tensor_dims, tensor_shapes

__all__ = ["Context", "Ops", "Segment", "Transformer", "dim_sizes", "tensor_dims", "tensor_shapes"]
