"""The attention core: tiles, the kernels that compute them, and the custom op for compiled graphs."""

from ndtrain.model.attention.scores import AttentionMod

__all__ = ["AttentionMod"]
