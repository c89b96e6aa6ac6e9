"""The model families: one file each. Importing this package registers them."""

from ndtrain.config import ModelConfig
from ndtrain.config.registry import get
from ndtrain.model.families import deepseek, glm, llama, mistral, mixtral, olmoe, qwen, qwen_moe
from ndtrain.model.families.family import Family

__all__ = ["Family", "deepseek", "family_of", "glm", "llama", "mistral", "mixtral", "olmoe", "qwen", "qwen_moe"]


def family_of(m: ModelConfig) -> Family:
    """Return the family of a model.

    Raises:
        ConfigError: no family has the name `model_type`.
    """
    return get("family", m.model_type)
