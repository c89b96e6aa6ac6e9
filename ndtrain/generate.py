"""Continues texts with a checkpoint: python -m ndtrain.generate CHECKPOINT 'text' ['text' ...] [key=value ...]

CHECKPOINT is a folder step-*, a run folder (its newest checkpoint), or a Hugging Face folder. One process holds the
whole model. An empty text starts from the token that ends a document.

{options}
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tokenizers
import torch

from ndtrain.arguments import ArgumentError, help_lines, near, option, parse, wants_help
from ndtrain.checkpoint import list_checkpoints
from ndtrain.checkpoint.verifying import SHORT
from ndtrain.config import ConfigError
from ndtrain.config.store import folder_at
from ndtrain.engine.generate import end_tokens, generate, load_model
from ndtrain.model.sampling import next_tokens
from ndtrain.run.failure_report import status_of_command

DTYPES = {name: dtype for dtype, name in SHORT.items()}


def _temperature(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{key}={text}: must be a number, 0 (greedy) or more")
    return value


def _seed(key: str, text: str) -> int:
    if not text.isdecimal():
        raise ArgumentError(f"{key}={text}: must be a whole number, 0 or more")
    return int(text)


@dataclass(frozen=True)
class Options:
    """The keys of the command."""

    max_new_tokens: int = option("maximum number of tokens to generate; an end-of-text token ends the text earlier", 64)
    temperature: float = option("0: always the most likely token (greedy); above 0: sample at this temperature",
                                0.0, read=_temperature)  # fmt: skip
    top_k: int | None = option("sample only from this number of most likely tokens; default: all", None)
    seed: int = option("seed of the sampling; default: 0", 0, read=_seed)
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = option(
        "precision of the computation; default: the precision of the files"
    ,
                                                                   None)  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = option("device to compute on; auto: a GPU if there is one", "auto")


def main(args: Sequence[str]) -> int:
    """Print each text with its continuation. If it cannot start, print the reason in one line and return 2."""
    if not args or wants_help(args):
        print((__doc__ or "").format(options=help_lines(Options)).strip())
        return 0 if args else 2
    try:
        keys = list(Options.__dataclass_fields__)
        words = [w for w in args[1:] if w.partition("=")[0] in keys and "=" in w]
        texts = [w for w in args[1:] if w not in words]
        _refuse_misspelt(texts, keys)
        if not texts:
            raise ArgumentError("the text is missing: ndtrain generate CHECKPOINT 'text' [key=value ...]")
        return run(folder_at(args[0]), texts, parse(Options, words))
    except (ArgumentError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _refuse_misspelt(texts: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse a text that looks like a misspelt key with a value.

    Raises:
        ArgumentError: a text is such a key.
    """
    for text in texts:
        key, equals, _ = text.partition("=")
        if equals and key.isidentifier() and (hint := near(key, keys, alike=0.8)):
            raise ArgumentError(f"{text}: no such key; {hint}If it is a text, begin it with a space")


def run(path: Path, texts: Sequence[str], o: Options) -> int:
    """Continue the texts one after the other.

    Raises:
        ConfigError: there is no checkpoint, it has no tokenizer, a file is damaged, or an empty text has no start
            token.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such folder")
    folder = next(iter(list_checkpoints(path / "checkpoints") or list_checkpoints(path)), path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder}: there is no tokenizer.json, so text cannot be tokenised: copy the model's tokenizer.json there"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{folder}: tokenizer.json cannot be used: {error}") from error
    if o.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: this machine has no CUDA device that torch can use")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device
    model, ends = load_model(folder, torch.device(kind), DTYPES[o.dtype] if o.dtype else None), end_tokens(folder)
    draws = torch.Generator(kind).manual_seed(o.seed)
    choose = partial(next_tokens, temperature=o.temperature, top_k=o.top_k, generator=draws)
    for text in texts:
        prompt = tokenizer.encode(text).ids or sorted(ends)[:1]
        if not prompt:
            raise ConfigError(f"{folder}: an empty text has no token to start from: give a text")
        _warn_if_long(len(prompt) + o.max_new_tokens, model.m.max_position_embeddings)
        began = time.perf_counter()
        made = generate(model, prompt, o.max_new_tokens, ends, choose)
        seconds = time.perf_counter() - began
        print(text + continuation(tokenizer, prompt, made), flush=True)
        print(f"{len(made)} tokens, {len(made) / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    return 0


def continuation(tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], made: Sequence[int]) -> str:
    """Return the text of the new tokens.

    Decode them together with the prompt, since a token may be a part of a character or begin with a space.
    """
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *made])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(made))


def _warn_if_long(length: int, most: int) -> None:
    if length > most:
        print(
            f"warning: {length} tokens exceed max_position_embeddings={most}, the longest context of the model",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(status_of_command(main))
