"""The host memory of a run stays flat over steps, saves at once and in the background, evaluations and samples."""

import gc
from pathlib import Path

import pytest

from ndtrain import Trainer, compose
from ndtrain.engine.callbacks import Callback
from tests.lib.helpers import arguments, write_corpus

FULL = pytest.mark.full
SMALL = [
    "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=2",
    "model.num_key_value_heads=1", "model.head_dim=32", "train.seq_len=16", "train.global_batch=1",
    "train.micro_batch=1", "train.log_every=100000",
]  # fmt: skip
PARTS = {  # what a run does again and again, every few steps
    "steps": [],
    "saves": ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.async_save=false"],
    "saves in the background": ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.async_save=true"],
    "evaluations": ["train.eval_every=2", "data.validation=0.3"],
    "samples": ["train.sample_every=2", "train.sample_tokens=4", "train.sample_prompts=[def]"],
}
ALL = [override for part in ("saves in the background", "evaluations", "samples") for override in PARTS[part]]


def written_bytes() -> int:
    """Memory that this process has written to and shares with nobody. Pages of a mapped corpus are not part of it."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith("Private_Dirty:"))


class Watch(Callback):
    """Notes the memory after some steps."""

    def __init__(self, *steps: int):
        self.bytes = dict.fromkeys(steps, 0)

    def on_step_end(self) -> None:
        if (step := self.trainer.state.step) in self.bytes:
            gc.collect()
            self.bytes[step] = written_bytes()


def growth(tmp_path: Path, first: int, last: int, overrides: list[str]) -> int:
    """Bytes that a run has grown by between two of its steps."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):  # files, of which some are held out
        write_corpus(corpus / f"{number}.txt", words=60 + number)
    cfg = compose(*arguments(tmp_path / "run", corpus, *SMALL, f"train.steps={last}", *overrides))
    watch = Watch(first, last)
    Trainer(cfg, callbacks=[watch]).train()
    assert all(watch.bytes.values()), "the callback was not called"
    return watch.bytes[last] - watch.bytes[first]


@pytest.mark.full
def test_memory_is_flat_over_saves_evaluations_and_samples(tmp_path):
    """A checkpoint has 1.1 MB here: one that stays at each of the 20 saves would be 22 MB."""
    assert growth(tmp_path, 20, 60, ALL) < 4 << 20


@FULL
@pytest.mark.parametrize("part", PARTS)
def test_memory_is_flat_over_repeated_part(part, tmp_path):
    """Each part runs 300 more times and leaves less than about 10 kB each time."""
    assert growth(tmp_path, 100, 700, PARTS[part]) < 3 << 20


@FULL
def test_memory_is_flat_over_ten_thousand_steps(tmp_path):
    """Growth is at most about 500 bytes a step."""
    assert growth(tmp_path, 500, 10_500, []) < 5 << 20
