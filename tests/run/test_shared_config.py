"""One configuration for all ranks, whatever their resolvers say."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.run import shared_config
from ndtrain.run.shared_config import Written
from ndtrain.run.signed_store import SignedStore
from tests.lib.helpers import arguments, checkpoint_of, one_error, rank_main, rows, run, write_corpus
from tests.lib.ranks import run_ranks

PATIENCE_S = 30.0
CLAIMED = ["owner/000001.json", {"host": "n0"}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def agreed(*overrides: list[str]) -> list[Config]:
    """The configurations that ranks with these overrides end up with, composed and resolved by each on its own."""
    messages, world = SignedStore(dist.HashStore(), "attempt", "secret"), len(overrides)
    composed = [load_config(given) for given in overrides]
    written = [Written.of(cfg) for cfg in composed]
    resolved = [resolve(cfg, world) for cfg in composed]

    def rank_0() -> Config:
        shared_config.publish(messages, world, resolved[0], written[0], CLAIMED, PATIENCE_S)
        return resolved[0]

    def other(rank: int) -> Config:
        cfg, claimed = shared_config.adopt(messages, rank, resolved[rank], written[rank], PATIENCE_S)
        assert claimed == CLAIMED
        return cfg

    with ThreadPoolExecutor(world) as pool:
        ranks = [pool.submit(rank_0), *(pool.submit(other, rank) for rank in range(1, world))]
        errors = {str(error) for rank in ranks if (error := rank.exception())}
        assert len(errors) < 2, errors  # every rank has the same line
        return [rank.result() for rank in ranks]


SAME = ["recipe=llama_debug", "mesh.fsdp=-1"]


def test_resolvers_of_rank_0_apply_to_all_ranks(monkeypatch):
    given = [*SAME, "run.dir='runs/${now:%H-%M-%S.%f}-${train.seq_len}'", "train.seq_len=${oc.env:LENGTH}"]
    composed = []
    for length in ("32", "64"):
        monkeypatch.setenv("LENGTH", length)
        composed.append(load_config(given))
    first, second = composed
    assert first.run.dir != second.run.dir and second.train.seq_len == 64
    messages, written = SignedStore(dist.HashStore(), "attempt"), [Written.of(cfg) for cfg in composed]
    resolve(first, 2), resolve(second, 2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(shared_config.publish, messages, 2, first, written[0], CLAIMED, PATIENCE_S)
        adopted, _ = shared_config.adopt(messages, 1, second, written[1], PATIENCE_S)
    assert adopted == first and adopted.frozen and adopted.run.dir.endswith("-32")


def test_ranks_with_same_overrides_agree():
    one, two = agreed(SAME, SAME)
    assert one == two and one.mesh.fsdp == 2


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.lr=0.5", "optim.lr=0.003 on rank 0 but 0.5 on rank 1"),
        ("run.name=other", "run.name=llama_debug on rank 0 but other on rank 1"),
        ("layout.rules.mlp=null", "layout.rules="),
        ("train.seq_len=${train.global_batch}", "train.seq_len=64 on rank 0 but 8 on rank 1"),
    ],
)
def test_differing_overrides_are_refused(override, line):
    with pytest.raises(ConfigError, match=f"^{line}.*: give every rank the same overrides$"):
        agreed(SAME, [*SAME, override])


@pytest.mark.parametrize("message", ["text", {}, {"written": 1, "resolved": {}, "claimed": []}])
def test_adopt_refuses_message_that_is_no_configuration(message):
    cfg = load_config(SAME)
    written, messages = Written.of(cfg), SignedStore(dist.HashStore(), "attempt")
    messages.put("configuration", message)
    with pytest.raises(ConfigError, match="rank 0 did not send a configuration"):
        shared_config.adopt(messages, 1, resolve(cfg, 2), written, PATIENCE_S)


def test_publish_names_rank_that_does_not_answer():
    cfg = load_config(SAME)
    written, messages = Written.of(cfg), SignedStore(dist.HashStore(), "attempt")
    messages.put("configuration/1", "same")
    with pytest.raises(dist.DistStoreError, match="rank 2 did not confirm the configuration within 0 s"):
        shared_config.publish(messages, 3, resolve(cfg, 2), written, CLAIMED, 0)


def test_two_ranks_share_folder_named_by_time(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=2", "train.steps=2", "optim.warmup=1")
    args.append(f"run.dir='{tmp_path}/runs/${{now:%H-%M-%S.%f}}'")
    assert run_ranks(rank_main, 2, args) == [0, 0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert checkpoint_of(folder, 2).is_dir() and len(rows(folder)) == 2
    (log,) = (folder / "logs").iterdir()
    assert log.name == "rank-0.log" and all(f" rank {r} INFO " in log.read_text() for r in (0, 1))


@pytest.mark.full
def test_torchrun_ranks_share_folder_named_by_time(tmp_path, corpus):
    args = [*arguments(Path("-"), corpus), "mesh.fsdp=2", "run.dir='runs/${now:%H.%f}'"]
    done = run(args, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert checkpoint_of(folder, 10).is_dir()


@pytest.mark.full
def test_torchrun_ranks_with_differing_overrides_are_refused(tmp_path, corpus, monkeypatch):
    """This is the case of two hosts started with different commands."""
    began = time.monotonic()
    args = arguments(tmp_path / "run", corpus, "mesh.fsdp=2", "run.seed=${oc.env:RANK}", "optim.lr=${oc.env:LR,1e-3}")
    (tmp_path / "driver.py").write_text(
        "import os, runpy, sys\nif os.environ['RANK'] == '1': sys.argv.append('train.steps=9')\n"
        "runpy.run_module('ndtrain.train', run_name='__main__', alter_sys=True)\n"
    )
    monkeypatch.setattr("tests.lib.helpers.MODULE", [str(tmp_path / "driver.py")])
    done = run(args, tmp_path, 2)
    assert done.returncode != 0 and "train.steps=10 on rank 0 but 9 on rank 1" in one_error(done.stderr)
    assert not rows(tmp_path / "run") and time.monotonic() - began < 60
