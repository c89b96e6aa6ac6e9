"""Text to tokens to batches: corpora, tokenizers, and the batch as a pure function of (seed, step).

The names below are imported on first access. `python -m ndtrain.data` and its workers therefore never import torch,
which takes longer than tokenising a small corpus.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtrain.data.batches import Batch, Prefetcher, Source, Tokens, microbatches, rows_of
    from ndtrain.data.dataset import Data
    from ndtrain.data.documents import Corpus, IterableCorpus
    from ndtrain.data.open import open_data
    from ndtrain.data.order import Sequences
    from ndtrain.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Data",
    "IterableCorpus",
    "Prefetcher",
    "Sequences",
    "Source",
    "Tokenizer",
    "Tokens",
    "load_tokenizer",
    "microbatches",
    "open_data",
    "rows_of",
]

_MODULES = {
    "batches": ("Batch", "Prefetcher", "Source", "Tokens", "microbatches", "rows_of"),
    "dataset": ("Data",),
    "documents": ("Corpus", "IterableCorpus"),
    "open": ("open_data",),
    "order": ("Sequences",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
