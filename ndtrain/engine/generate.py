"""Loads a checkpoint as one plain model and continues token sequences with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ndtrain.checkpoint.directory import plugins_of, read_state
from ndtrain.checkpoint.pretrained import (
    check_folder,
    naming,
    open_weights,
    read_model,
    selection_biases,
)
from ndtrain.checkpoint.verifying import blocks
from ndtrain.config import ConfigError
from ndtrain.config.json_file import read_object
from ndtrain.config.registry import load_plugins
from ndtrain.engine.kv_cache import KeyValueCache
from ndtrain.model import Ops, Transformer
from ndtrain.model.sampling import next_tokens

Choose = Callable[[Tensor], Tensor]  # logits [B, V] -> tokens [B]


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
    """Return the model of a checkpoint or a Hugging Face folder, read tensor by tensor.

    Args:
        dtype: of the weights and the computation; None: the dtype of the files.

    Raises:
        ConfigError: config.json describes no known model, the weights do not fit it, or a file cannot be read. The
            message is one line.
    """
    if (folder / "state.json").is_file():
        load_plugins(plugins_of(read_state(folder)))
    m = read_model(folder)
    check_folder(folder, m)
    with torch.device("meta"):
        model = Transformer(m)
    with naming(folder):
        reader = open_weights(folder)
        for name, parameter in list(model.named_parameters()):
            whole = torch.empty(parameter.shape, dtype=dtype or reader.dtype(name), device=device)
            for rows, block in blocks(reader, name):
                whole.view(-1)[rows.start : rows.start + rows.numel].copy_(block)
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(whole, requires_grad=False))
        model.use_biases(selection_biases(folder, m).to(device))
    return model


def end_tokens(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text, from generation_config.json or else config.json; empty if neither names any.

    Raises:
        ConfigError: a file cannot be read, or its eos_token_id is not a token id or a list of ids.
    """
    for path in (folder / "generation_config.json", folder / "config.json"):
        said = read_object(path).get("eos_token_id") if path.is_file() else None
        if said is not None:
            ids = said if isinstance(said, list) else [said]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise ConfigError(f"{path}: eos_token_id must be a token id, or a list of them")
            return frozenset(ids)
    return frozenset()


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    ends: frozenset[int] = frozenset(),
    choose: Choose = next_tokens,
) -> list[int]:
    """Return the tokens that follow the prompt, up to a token of `ends` or `max_new_tokens`.

    Keys and values are cached, so each new token costs the forward of one token.

    Args:
        prompt: one token or more.
        choose: picks the next tokens from their logits.
    """
    cache = KeyValueCache(len(prompt) + max_new_tokens)
    model.use(replace(Ops(), core=cache.core))
    device = model.head.weight.device
    tokens_BT, made = torch.tensor([list(prompt)], device=device), []
    while len(made) < max_new_tokens:
        token = int(choose(_logits(model, tokens_BT, cache)))
        made.append(token)
        if token in ends:
            break
        tokens_BT = torch.tensor([[token]], device=device)
    model.use(Ops())
    return made


def _logits(model: Transformer, tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the logits [B, V] after the last of the new tokens, and add these tokens to the cache."""
    B, T = tokens_BT.shape
    positions_T = torch.arange(cache.tokens, cache.tokens + T, device=tokens_BT.device)
    x, ctx = None, model.context(tokens_BT, tokens_BT, model.head.weight.dtype, positions=positions_T)
    for segment in model.segments()[:-1]:
        x = segment.run(x, ctx)
    cache.advance(T)
    return x.view(B, T, -1)[:, -1] @ model.head.weight.T
