"""The ranks that are busy for longer than the ranks with the same work."""

from statistics import median
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.config import load_config, resolve
from ndtrain.engine.trainer import Trainer
from ndtrain.mesh.flight_recorder import Recorder
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.observe.stragglers import WINDOW, Stragglers, _medians_of_others
from tests.lib.helpers import arguments, given_process_group, write_corpus
from tests.lib.ranks import run_ranks


@given(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=9))
def test_medians_of_others_leave_out_one_value_each(values):
    others = [values[:i] + values[i + 1 :] or values for i in range(len(values))]
    assert _medians_of_others(np.array(values)).tolist() == [median(rest) for rest in others]


def test_straggler_is_named_once_and_on_recovery():
    watch = Stragglers(MeshSpec(("pp", "tp"), (2, 2)))
    usual = [0.1, 0.1, 0.4, 0.4]  # the second stage has more work, so its ranks are not slow
    slow, barely = [0.1, 0.1, 0.4, 0.7], [0.1, 0.1, 0.4, 0.55]  # still slow until 1.2 times its peers
    lines = [watch.compare(busy) for busy in (usual, usual, slow, slow, barely, barely, usual, usual)]
    assert [len(said) for said in lines] == [0, 0, 1, 0, 0, 0, 1, 0]
    text = f"rank 3 (pp=1 tp=1) is slow: busy 0.7 s per step, its peers 0.4 s (median of {WINDOW} steps)"
    assert lines[2] == [text] and lines[6][0].startswith("rank 3 (pp=1 tp=1) is no longer slow: ")


def test_tiny_difference_is_no_straggler():
    assert Stragglers(MeshSpec(("dp",), (2,))).compare([0.001, 0.009]) == []


# -------------------------------------------------------------------------------------------------------------- in runs


def slow_run(every: int, args: list[str]) -> list[str]:
    """The warnings of a run whose rank 1 is busy for longer in every `every`th step."""

    def busy(self) -> float:
        return 0.3 if dist.get_rank() == 1 and self.step % every == 0 else 0.1

    with mock.patch.object(Recorder, "busy", busy), given_process_group():
        trainer = Trainer(resolve(load_config(args), 2))
        said = []
        with mock.patch.object(trainer, "warn", said.append):
            trainer.train()
        trainer.close()
    return said


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 3])
def test_slow_rank_is_named_by_its_median(every, tmp_path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "mesh.dp=2", "train.steps=41")
    of_rank_0, of_rank_1 = run_ranks(slow_run, 2, every, args)
    line = f"rank 1 (dp=1) is slow: busy 0.3 s per step, its peers 0.1 s (median of {WINDOW} steps)"
    assert (of_rank_0, of_rank_1) == ([line] * (every == 1), [])
