"""Several loggers at once, TensorBoard's files, and wandb's group, tags, owner and best evaluation loss."""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ndtrain.config import ConfigError, LoggerConfig, compose, load_config, registry, resolve, to_config
from ndtrain.observe import Metrics, tensorboard_logger
from ndtrain.observe.wandb_logger import NO_EVALUATION, best_evaluation
from ndtrain.plugins import register_logger
from tests.observe.test_metrics import log, make, wandb, wandb_records  # noqa: F401 (a fixture)


@dataclass
class FirstConfig(LoggerConfig):
    first: int = 1


@dataclass
class SecondConfig(LoggerConfig):
    second: str = "b"


class ListLogger:
    """Keeps the steps it is given."""

    def __init__(self, cfg, run_dir, warn):
        self.steps, self.code = [], None

    def log(self, row):
        self.steps.append(row["step"])

    def finish(self, exit_code=0):
        self.code = exit_code


@pytest.fixture
def two(monkeypatch):
    """Two loggers with keys of their own, registered as plugins' are."""
    registry.names("logger")
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    register_logger("first", config=FirstConfig)(type("First", (ListLogger,), {}))
    register_logger("second", config=SecondConfig)(type("Second", (ListLogger,), {}))


def test_a_list_of_loggers_has_the_keys_of_all(two):
    cfg = compose("logger=[first,second,jsonl]", "logger.second=c", "logger.group=g")
    assert cfg.logger.names == ["first", "second", "jsonl"]
    assert (cfg.logger.first, cfg.logger.second, cfg.logger.group) == (1, "c", "g")
    again = to_config(OmegaConf.structured(cfg)).logger
    assert (again.names, again.first, again.second) == (cfg.logger.names, 1, "c")


def test_every_logger_of_a_list_gets_every_row(two, tmp_path):
    metrics = make(tmp_path, logger="[first,second]")
    log(metrics, 1)
    log(metrics, 2)
    metrics.close(exit_code=3)
    assert [(x.steps, x.code) for x in metrics._loggers.values()] == [([1, 2], 3)] * 2
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("override", ["logger=[wandb,tensorbord]", "logger.name=[wandb,tensorbord]"])
def test_an_unknown_logger_in_a_list_names_the_near_miss(override):
    with pytest.raises(ConfigError, match=r"tensorbord: no such .* 'tensorboard'"):
        resolve(compose(override), 1)


def test_single_logger_name_is_accepted():
    assert compose("logger=jsonl").logger.names == ["jsonl"]
    assert compose("logger.name=jsonl").logger.names == ["jsonl"]
    assert compose().logger.name == "wandb"


def test_missing_tensorboard_is_one_line_error(monkeypatch):
    real = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "tensorboard" else real(name, *rest)
    monkeypatch.setattr(tensorboard_logger, "find_spec", absent)
    with pytest.raises(ConfigError, match=r"^logger=tensorboard: .*pip install tensorboard") as error:
        resolve(compose("logger=[jsonl,tensorboard]"), 1)
    assert "\n" not in str(error.value)
    resolve(compose("logger=jsonl"), 1)


@pytest.mark.full
def test_tensorboard_events_continue_after_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = make(tmp_path, logger="tensorboard")
    for step in (1, 2, 3, 4):
        log(first, step, loss=9.0)
        first.samples(step, [("Once", " upon a time")])
    first.close()
    second = make(tmp_path, start=2, resume=True, logger="tensorboard")
    for step in (3, 4, 5):
        log(second, step, grad_norm=math.nan if step == 4 else 1.0)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 9), (2, 9), (3, 7.25), (4, 7), (5, 6.75)]
    assert [e.step for e in events.Tensors("sample 0/text_summary")] == [1, 2, 3, 4]
    assert b"**Once** upon a time" in events.Tensors("sample 0/text_summary")[0].tensor_proto.string_val[0]
    assert {"mfu", "lr", "peak_memory_bytes"} <= set(events.Tags()["scalars"])


def test_best_evaluation_reads_lowest_loss_and_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert best_evaluation(path) == NO_EVALUATION
    losses = [None, 3.0, 2.5, 2.75]
    path.write_text("".join(json.dumps({"step": i, "eval_loss": x}) + "\n" for i, x in enumerate(losses)) + '{"step":9')
    assert best_evaluation(path) == (2.5, 2)


@pytest.mark.full
def test_wandb_gets_group_tags_entity_and_best_evaluation(tmp_path, wandb):  # noqa: F811
    cfg = ["logger.group=sweep", "logger.tags=[small,test]", "logger.entity=us"]
    for start, losses in ((0, (3.0, 2.5, None)), (3, (2.75, math.nan))):
        metrics = make_with(tmp_path, cfg, start)
        for step, loss in enumerate(losses, start + 1):
            log(metrics, step, **({} if loss is None else {"eval_loss": loss}))
        metrics.close()
    records = wandb_records(tmp_path)
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.run_group, tuple(r.tags), r.entity) for r in runs} == {("sweep", ("small", "test"), "us")}
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= {u.key or u.nested_key[0]: json.loads(u.value_json) for u in record.summary.update}
    assert (summary["best_eval_loss"], summary["best_eval_step"]) == (2.5, 2)


def make_with(folder: Path, overrides: list[str], start: int) -> Metrics:
    cfg = load_config([f"run.dir={folder}", "run.name=t", "logger=wandb", *overrides])
    return Metrics(cfg, folder, start, 1e8, 1.25e8, 1e12, 4, start > 0)


@pytest.mark.full
def test_optional_packages_are_not_imported_at_start():
    code = (
        "import sys, ndtrain.train; from ndtrain.config import compose, resolve; resolve(compose(), 1);"
        "print([m for m in ('wandb', 'tensorboard', 'transformers', 'datasets', 'matplotlib', 'torch._dynamo', "
        "'sympy', 'torch.utils.tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
