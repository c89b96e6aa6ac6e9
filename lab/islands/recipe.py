"""The runs that islands of a trial train."""

from pathlib import Path

from tests.lib.helpers import arguments, write_corpus

FOREVER = 1_000_000  # steps of a run that its trial ends


def overrides(folder: Path, *more: str) -> list[str]:
    """Return the overrides of a small run. Each step is in metrics.jsonl, and none on the console."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(corpus)
    own = ["train.compile=false", "train.log_every=1000000", "train.micro_batch=1", *more]
    return [x for x in arguments(folder, corpus, *own) if not x.startswith("run.dir=")]


def model(hidden: int, layers: int, seq_len: int) -> list[str]:
    """Return the overrides of a Llama of this size with 512 tokens in its vocabulary."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "max_position_embeddings": seq_len,
    }
    return [*(f"model.{key}={value}" for key, value in sizes.items()), f"train.seq_len={seq_len}"]


def names(count: int) -> list[str]:
    """Return the names of islands: a, b, c and so on."""
    return [chr(ord("a") + i) for i in range(count)]
