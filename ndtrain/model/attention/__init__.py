"""The attention core: tiles, their kernels, and the custom op for compiled graphs."""

from ndtrain.model.attention.scores import AttentionMod

__all__ = ["AttentionMod"]
