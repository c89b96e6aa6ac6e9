"""Messages and refusals of a run before its first step."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from ndtrain.checkpoint import State
from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.data import open_data
from ndtrain.engine.resume import _chosen
from ndtrain.optim.lr_schedule import idle_steps
from ndtrain.train import main
from tests.data.test_data import config as data_config
from tests.lib.helpers import arguments, checkpoint_of, refusal, rows, write_corpus

PLAIN = "recipe=llama_debug"  # 20 steps, of which 4 warm up


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run folder with four steps, all of its plan, and a checkpoint of each second."""
    folder = tmp_path_factory.mktemp("finished")
    corpus = write_corpus(folder / "corpus.txt")
    assert main(arguments(folder / "run", corpus, "train.steps=4", "checkpoint.every=2")) == 0
    return folder


def run(finished: Path, *overrides: str) -> list[str]:
    return arguments(finished / "run", finished / "corpus.txt", "resume=auto", *overrides)


# ---------------------------------------------------------------------------------------------------- resumed runs


def test_finished_run_has_nothing_to_do_and_succeeds(finished, capsys):
    assert main(run(finished, "train.steps=4")) == 0
    done = f"nothing to do: step 4 of 4 is already done: {checkpoint_of(finished / 'run', 4)}"
    assert done in capsys.readouterr().out
    assert main(run(finished, "train.steps=9", "train.stop_at=4")) == 0


@pytest.mark.parametrize(
    ("plan", "key"), [(["train.steps=3"], "train.steps=3"), (["train.stop_at=2"], "train.stop_at=2")]
)
def test_last_step_before_checkpoint_is_refused(finished, plan, key, capsys):
    line = refusal(capsys, run(finished, *plan))
    assert line.startswith(f"{key}: the run is already at step 4 ({checkpoint_of(finished / 'run', 4)}): raise")
    assert len(rows(finished / "run")) == 4, "the metrics are as they were"


# ---------------------------------------------------------------------------------------------------------- warmup


def warmup_of(*overrides: str) -> tuple[int, list[str]]:
    cfg = resolve(load_config([PLAIN, *overrides]), 1)
    return cfg.optim.warmup, cfg.notes


def test_recipe_warmup_is_shortened_to_fit_run():
    assert warmup_of() == (4, [])
    assert warmup_of("train.steps=5") == (4, [])
    for steps, fitting in ((4, 1), (2, 1), (1, 0)):
        warmup, (note,) = warmup_of(f"train.steps={steps}")
        assert warmup == fitting and f"optim.warmup=4 of the recipe is too long for {steps} step" in note
    assert warmup_of("optim.decay_steps=3")[0] == 1
    assert warmup_of("train.steps=3", "optim.schedule=constant") == (4, [])


def test_an_explicit_warmup_longer_than_the_run_is_refused():
    for overrides in (["optim.warmup=4", "train.steps=3"], ["optim.warmup=30"], ["++optim.warmup=4", "train.steps=4"]):
        with pytest.raises(ConfigError, match=r"optim\.warmup=\d+ must be less than"):
            warmup_of(*overrides)


def test_shortened_warmup_gives_warning(tmp_path, capsys):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "train.steps=2")
    assert main([arg for arg in args if not arg.startswith(("optim.warmup", "train.steps=10"))]) == 0
    assert "warning: optim.warmup=4 of the recipe is too long for 2 steps: shortened to 1" in capsys.readouterr().out
    assert "warmup: 1" in (tmp_path / "run/config.yaml").read_text()


# ------------------------------------------------------------------------------------------------------- idle steps

IDLE = {  # overrides of ten steps -> words of the warning; none: it is None
    "cosine to 0": (["optim.min_lr=0"], ["learning rate 0 at step 10, the last,", "optim.decay_steps=11"]),
    "linear to 0": (["optim.min_lr=0", "optim.schedule=linear"], ["step 10, the last,", "optim.min_lr above 0"]),
    "a decay that ends early": (["optim.min_lr=0", "optim.decay_steps=7"], ["steps 7 to 10 of train.steps=10"]),
    "one step": (["optim.min_lr=0", "train.steps=1", "optim.warmup=0"], ["step 1, the last,"]),
    "all warmup": (["optim.schedule=constant", "optim.warmup=10"], ["all 10 steps of the run are warmup"]),
    "factors of 0": (["optim.lr_mult={*:0}"], ["optim.lr_mult: every factor is 0"]),
    "a rate at the end": (["optim.min_lr=1e-6"], []),
    "a run that stops before": (["optim.min_lr=0", "train.stop_at=9"], []),
    "a decay beyond the end": (["optim.min_lr=0", "optim.decay_steps=11"], []),
    "constant": (["optim.schedule=constant", "optim.min_lr=0"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_idle_steps_names_steps_without_update(name):
    overrides, words = IDLE[name]
    cfg = resolve(load_config([PLAIN, "train.steps=10", "optim.warmup=2", *overrides]), 1)
    line = idle_steps(cfg.optim, cfg.train.steps, cfg.train.stop_at or cfg.train.steps)
    assert (line is None) == (not words) and all(word in (line or "") for word in words), line


def test_last_step_without_update_gives_warning(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.txt")
    assert main(arguments(tmp_path / "run", corpus, "train.steps=3", "optim.min_lr=0")) == 0
    assert "warning: optim.schedule=cosine has learning rate 0 at step 3" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ positions, epochs


def test_seq_len_beyond_positions_names_possible_fix():
    assert resolve(load_config([PLAIN, "train.seq_len=256"]), 1)
    assert resolve(load_config([PLAIN, "train.seq_len=512", "model.max_position_embeddings=512"]), 1)
    cfg = load_config([PLAIN, "train.seq_len=512"])
    cfg.init_from = "some/folder"
    with pytest.raises(ConfigError, match=r"seq_len=512 exceeds .*=256.* in the config.json of init_from=some/folder"):
        resolve(cfg, 1)


def test_corpus_smaller_than_step_gives_warning(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 320)
    (tmp_path / "b.txt").write_text("b" * 3200)
    alone = data_config({"name": "text", "path": str(tmp_path / "a.txt"), "validation": 0}, tmp_path)
    data = open_data(alone)
    sequences = (len(data.train[0]) - 1) // alone.train.seq_len
    alone.train.global_batch = sequences
    assert data.warnings(alone) == []
    alone.train.global_batch = 3 * sequences
    (line,) = data.warnings(alone)
    assert re.search(
        rf"a.txt: one step of train.global_batch={3 * sequences} reads it 3 times: it has {sequences} ", line
    )


def test_small_corpus_of_mixture_gives_warning(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 320)
    (tmp_path / "b.txt").write_text("b" * 32000)
    entries = [
        {"name": "text", "path": str(tmp_path / name), "weight": 1, "validation": 0} for name in ("a.txt", "b.txt")
    ]
    cfg = data_config({"name": "blend", "blend": entries}, tmp_path)
    data = open_data(cfg)
    count = (len(data.train[0]) - 1) // cfg.train.seq_len
    cfg.train.global_batch = 2 * count
    assert data.warnings(cfg) == []
    cfg.train.global_batch = 4 * count
    (line,) = data.warnings(cfg)
    assert "a.txt: one step" in line and "reads it 2 times" in line


# ----------------------------------------------------------------------------------------------------------- saves


def test_periodic_saves_are_in_the_console(tmp_path, capsys):
    args = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "train.steps=4", "checkpoint.every=2")
    assert main(args) == 0
    out = capsys.readouterr().out
    saves = re.findall(r"^saved (\S+) in [\d.]+ s, of which training waited [\d.]+ s$", out, re.MULTILINE)
    assert saves == [str(checkpoint_of(tmp_path / "run", 2))], "the last line names that of step 4"
    assert f"finished step 4 of 4: saved {checkpoint_of(tmp_path / 'run', 4)}" in out


# ------------------------------------------------------------------------------------------- what rank 0 has chosen


def test_resume_choice_of_rank_0_round_trips_as_json():
    state = State(4, 100, {"run.seed": 1}, 0, {"epoch": 1})
    sent = {"path": "runs/a/checkpoints/step-00000004", "state": asdict(state), "resume": "auto"}
    assert _chosen(json.loads(json.dumps(sent))) == (Path(sent["path"]), state, "auto")
    assert _chosen({"path": None, "state": None, "resume": "none"}) == (None, None, "none")
    for change in (
        {"path": 1},
        {"state": None},
        {"state": asdict(state) | {"step": "4"}},
        {"state": {}},
        {"resume": 1},
    ):
        with pytest.raises(ValueError, match="rank 0 sent a message that names no checkpoint"):
            _chosen(sent | change)
