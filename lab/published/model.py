"""The shape of a published model. The table does not state whether the MLP is gated or the embeddings are tied: both
follow from the number of parameters."""

import re
from dataclasses import replace

from lab.published.cells import Row, count, number, text
from lab.published.gpt import GPT
from ndtrain.config import ConfigError, ModelConfig
from ndtrain.model.flops import parameter_count

VOCAB = 50304  # if the table has none: GPT-2's, padded to a multiple of 128
_CLOSE = 0.01  # parameter counts that differ by less match, up to positions, biases and rounding
_FAR = 0.3  # with a larger difference it is another model, with experts or an encoder
_GATED = re.compile(r"llama|mistral|qwen|gemma|palm|olmo|deepseek|yi-|smollm|internlm|baichuan", re.IGNORECASE)
_UNGATED = re.compile(r"gpt|mpt|opt|bloom|falcon|pythia|neox|megatron|turing|bert", re.IGNORECASE)

_EXPERTS = re.compile(r"mixtral|\bmoe\b|\b\d+x\d+(\.\d+)?b\b|\b\d+ experts\b", re.IGNORECASE)


def model_of(row: Row) -> ModelConfig:
    """Return the model of a row. The row does not state whether the MLP is gated or the embeddings are tied. Choose the
    likeliest combination whose parameter count matches the row's, or else the closest.

    Raises:
        ConfigError: a size is missing, the model has experts, or no dense decoder of these sizes comes close.
    """
    if experts := _EXPERTS.search(text(row, "model")) or _EXPERTS.search(text(row, "notes")):
        raise ConfigError(f"model={text(row, 'model')}: {experts[0].strip()}: models with experts are not supported")
    hidden = count(row, "hidden")
    heads = count(row, "heads")
    sizes = ModelConfig(
        vocab_size=count(row, "vocab", VOCAB),
        hidden_size=hidden,
        intermediate_size=count(row, "ffn", 4 * hidden),
        num_hidden_layers=count(row, "layers"),
        num_attention_heads=heads,
        num_key_value_heads=count(row, "kv_heads", heads),
        max_position_embeddings=count(row, "seq_len"),
    )
    if hidden % heads:
        raise ConfigError(f"hidden={hidden} is not a multiple of heads={heads}, and the table has no head_dim")
    sizes.head_dim = hidden // heads
    candidates = _candidates(sizes, text(row, "model"))
    stated = number(row, "params_b")
    if stated is None:
        return candidates[0][0]
    off = [abs(parameters / (stated * 1e9) - 1) for _, parameters in candidates]
    if min(off) > _FAR:
        closest = candidates[off.index(min(off))][1] / 1e9
        raise ConfigError(
            f"params_b={stated:g}: a dense decoder of these sizes has {closest:.3g}; models with experts are not "
            "supported"
        )
    alike = [model for (model, _), error in zip(candidates, off, strict=True) if error < _CLOSE]
    return alike[0] if alike else candidates[off.index(min(off))][0]


def _candidates(sizes: ModelConfig, name: str) -> list[tuple[ModelConfig, int]]:
    """Return (model, parameters), the likeliest first. GPTs tie their embeddings, and may have learned positions. Gated
    models mostly have untied embeddings."""
    kinds = _kinds(sizes, name)
    positions = sizes.max_position_embeddings * sizes.hidden_size
    made = []
    for kind in kinds:
        for tied in (True, False) if kind == GPT.model_type else (False, True):
            model = replace(sizes, model_type=kind, tie_word_embeddings=tied)
            made.append((model, parameter_count(model)))
            if kind == GPT.model_type and tied:
                made.append((model, parameter_count(model) + positions))
    return made


def _kinds(sizes: ModelConfig, name: str) -> list[str]:
    """Return the families that a model may belong to, the likeliest first; only one if its name decides."""
    if _GATED.search(name):
        return ["llama"]
    if _UNGATED.search(name):
        return [GPT.model_type]
    gated_first = (
        sizes.intermediate_size != 4 * sizes.hidden_size or sizes.num_key_value_heads != sizes.num_attention_heads
    )
    return ["llama", GPT.model_type] if gated_first else [GPT.model_type, "llama"]
