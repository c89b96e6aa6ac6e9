"""`trainer.model`: the modules of a rank, for hooks and inspection from Python."""

from pathlib import Path

import pytest
from torch import nn

from ndtrain import Trainer, compose
from ndtrain.config import Config, resolve
from ndtrain.model import flops
from ndtrain.model.block import Block
from ndtrain.program.launch_order import LaunchOrderError
from tests.lib.helpers import arguments, given_process_group, write_corpus
from tests.lib.ranks import run_ranks


def names_and_blocks(args: list[str]) -> tuple[list[list[str]], list[int]]:
    """Trains a run. Returns the names of the parameters of each module of `trainer.model`, and for each module the
    number of forwards that hooks on its blocks have seen."""
    with given_process_group():
        trainer = Trainer(compose(*args))
    assert isinstance(trainer.model, nn.ModuleList)
    seen = [0] * len(trainer.model)

    def count(place: int) -> None:
        seen[place] += 1

    for place, module in enumerate(trainer.model):
        for block in module.modules():
            if isinstance(block, Block):
                block.register_forward_hook(lambda *_, place=place: count(place))
    with given_process_group():
        assert trainer.train() == 0
    trainer.close()
    return [[name for name, _ in module.named_parameters()] for module in trainer.model], seen


def test_trainer_model_has_every_module_in_one_process(tmp_path: Path):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "train.steps=3", "train.micro_batch=8")
    (names,), (forwards,) = names_and_blocks(args)
    shapes = flops.block_shapes(resolve(compose(*args), 1).model)
    blocks = {f"model.layers.{layer}.{name}" for layer in range(2) for name in shapes}
    assert set(names) == blocks | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert forwards == 3 * 2, "a hook on a block is called in every forward of every step"


@pytest.mark.full
def test_trainer_model_of_pipeline_rank_has_its_chunks_in_order(tmp_path: Path):
    plan = ["mesh.pp=2", "schedule=interleaved", "schedule.chunks=2", "model.num_hidden_layers=4", "train.steps=3"]
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), *plan)
    ranks = run_ranks(names_and_blocks, 2, args)
    layers = [[sorted({n.split(".")[2] for n in names if ".layers." in n}) for names in rank[0]] for rank in ranks]
    assert layers == [[["0"], ["2"]], [["1"], ["3"]]]
    assert "model.embed_tokens.weight" in ranks[0][0][0] and "lm_head.weight" in ranks[1][0][1]
    assert all(forwards == 3 * 4 for rank in ranks for forwards in rank[1]), "3 steps of 4 microbatches"


def test_trainer_whose_ranks_would_wait_forever_does_not_start(tmp_path: Path, monkeypatch):
    """The proof itself is tested in tests/plan/test_program.py."""

    def deadlock(cfg: Config, device: str) -> bool:
        raise LaunchOrderError("deadlock:\n  rank 0 waits")

    monkeypatch.setattr("ndtrain.engine.trainer.prove_if_short", deadlock)
    with pytest.raises(LaunchOrderError, match="rank 0 waits"):
        Trainer(compose(*arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"))))
