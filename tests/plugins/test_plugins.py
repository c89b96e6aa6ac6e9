"""A user's package adds parts to ndtrain without a change to it; what is wrong with a plugin is one clear line."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ndtrain.config import Config, ConfigError, load_config, resolve, to_yaml
from ndtrain.data import IterableCorpus, open_data
from ndtrain.data.__main__ import main as prepare
from ndtrain.data.mixture import mixture_entries
from ndtrain.data.workers import pickled
from ndtrain.engine.train_step import TrainingStep
from ndtrain.evaluate import main as evaluate
from ndtrain.model.families.hf_config import from_hf, to_hf
from ndtrain.model.families.hf_fields import unknown_fields
from ndtrain.run import exit_status
from ndtrain.run.failure_report import status_of_command
from ndtrain.train import main
from tests.lib.helpers import arguments, checkpoint_of, given_process_group, one_error, refusal, rows, write_corpus
from tests.lib.parity import FP64, SHAPE, Run, assemble, compare, rank_run
from tests.lib.plugins import importable
from tests.lib.ranks import run_ranks
from tests.parallel.test_unit_groups import mixed

PLUGIN = "plugins=[example_package.parts]"
PARTS = [PLUGIN, "optim=factored", "model=squared_relu", "data=counting", "callbacks.loss_file.every=2"]
# names of the plugin's own keys, each with its near miss
MISSPELT = {
    "optim.betta=0.5": "optim.beta",
    "model.relu_powr=3": "model.relu_power",
    "data.document=3": "data.documents",
    "callbacks.loss_file.evry=3": "callbacks.loss_file.every",
    "callbacks.loss_fil.every=3": "callbacks.loss_file.every",
    "model.spacng=3": "model.spacing",
}


@pytest.fixture(autouse=True)
def path():
    """The packages of this folder can be imported; what they registered is forgotten."""
    with importable("broken_plugin"):
        yield


# --------------------------------------------------------------------------------------------------------- parity

MULTS = ["optim.lr_mult={*.down_proj.weight:4}", "optim.wd_mult={*.q_proj.weight:3}"]
MODEL = [*SHAPE, *FP64, PLUGIN, "optim=factored", *MULTS, "model.model_type=squared_relu", "train.global_batch=8"]
MESHES = {
    "dp fsdp tp": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "model.num_key_value_heads=2", "train.micro_batch=2"],
    "pp tied": ["mesh.pp=2", "mesh.fsdp=2", "model.tie_word_embeddings=true", "train.micro_batch=2"],
}
STATE = ("row", "column")
MOD = [*SHAPE, *FP64, PLUGIN, "model.attention=spaced", "model.spacing=4", "train.global_batch=8"]
GROUPED = ["model.num_attention_heads=4", "model.num_key_value_heads=2", "model.hidden_size=32"]
MOD_MESHES = {  # places in the whole model and sequence, however heads and tokens are cut
    "tp, ring, packed": (4, ["mesh.tp=2", "mesh.cp=2", "data.pack=true", *GROUPED]),
    "tp, ulysses, recompute": (4, ["mesh.tp=2", "mesh.cp=2", "cp.kind=ulysses", "recompute=selective", *GROUPED]),
    "compiled, ring, window": (2, ["mesh.cp=2", "train.compile=true", "recompute=full", "model.model_type=mistral",
                                   "model.sliding_window=5"]),
}  # fmt: skip


def run_of(overrides: list[str]) -> tuple[Run, list[tuple]]:
    """On one rank: `rank_run` without the moments of AdamW, and what it owns of the factored state."""
    from ndtrain.engine.train_step import TrainingStep

    with importable():
        made: list = []
        init = TrainingStep.__init__

        def keeping(self, cfg, mesh, stages):
            made.append(stages)
            init(self, cfg, mesh, stages)

        TrainingStep.__init__ = keeping
        run, pieces = rank_run(overrides, "uneven", kinds=(("weight", "master"),))
        (stages,) = made
    for tensor in stages.units.owners.owned:
        for name, state in tensor.state.items():
            if state.numel():
                pieces.append((name, tensor.name, tuple(state.shape), 0, state.flatten().clone()))
    return run, pieces


@pytest.mark.parametrize("name", [pytest.param("dp fsdp tp", marks=pytest.mark.full), "pp tied"])
def test_plugin_family_and_optimizer_equal_one_process(name):
    """Losses, norms, gradients, weights and the factored state of three steps, against one process."""
    mesh = MESHES[name]
    ranks = 8 if name == "dp fsdp tp" else 4
    same = [o for o in mesh if o.startswith("model.")]
    got = assemble(run_ranks(run_of, ranks, [*MODEL, *mesh]))
    want = assemble(run_ranks(run_of, 1, [*MODEL, *same, "train.micro_batch=8"]))
    assert {*STATE, "weight", "gradient"} == got.tensors.keys()
    compare(got, want, loss=1e-10, state=1e-9)


def mod_run(overrides: list[str]) -> tuple[Run, list[tuple]]:
    with importable():
        return rank_run(overrides, "uneven")


MODS_SAMPLED = "tp, ring, packed"


@pytest.mark.parametrize(
    "name", [n if n == MODS_SAMPLED else pytest.param(n, marks=pytest.mark.full) for n in MOD_MESHES]
)
def test_plugin_attention_on_mesh_equals_one_process(name):
    ranks, mesh = MOD_MESHES[name]
    same = [o for o in mesh if o.startswith(("model.", "data."))]
    got = assemble(run_ranks(mod_run, ranks, [*MOD, *mesh, "train.micro_batch=2"], timeout=300))
    want = assemble(run_ranks(mod_run, 1, [*MOD, *same, "train.micro_batch=8"]))
    compare(got, want, loss=1e-10, state=1e-9)
    plain = [o for o in MOD if not o.startswith(("model.attention", "model.spacing"))]
    without = assemble(run_ranks(mod_run, 1, [*plain, *same, "train.micro_batch=8"]))
    assert abs(without.losses[0] - want.losses[0]) > 1e-4, "the mod changes nothing"


@pytest.mark.full
def test_plugin_optimizer_owners_are_in_groups_of_their_unit():
    """Each tensor's owner is among the ranks of its unit's own groups."""
    mesh = ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2", "model.num_key_value_heads=2", "train.micro_batch=2"]
    got = assemble(run_ranks(mixed, 8, run_of, [*MODEL, *mesh]))
    want = assemble(run_ranks(run_of, 1, [*MODEL, "model.num_key_value_heads=2", "train.micro_batch=8"]))
    compare(got, want, loss=1e-10, state=1e-9)


# ------------------------------------------------------------------------------------------------- the whole program


def train(args: list[str]) -> int:
    from ndtrain.train import main

    with importable(), given_process_group():
        return main(args)


def plugin_run(folder: Path, *overrides: str) -> list[str]:
    return [
        "recipe=llama_debug", *PARTS, "model.num_attention_heads=4", "model.num_key_value_heads=2",
        "model.vocab_size=300", "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2",
        "train.steps=8", "optim.warmup=2", "optim.schedule=staircase", "logger=jsonl", "data.tokenizer=byte",
        "hardware.device=cpu", "hardware.peak_tflops=0.1", f"run.dir={folder}", *overrides,
    ]  # fmt: skip


def test_plugin_run_resumes_on_another_mesh(tmp_path):
    one, cut = tmp_path / "one", tmp_path / "cut"
    assert run_ranks(train, 1, plugin_run(one)) == [0]
    assert run_ranks(train, 4, plugin_run(cut, "mesh.fsdp=2", "mesh.tp=2", "train.stop_at=4")) == [0] * 4
    assert run_ranks(train, 2, plugin_run(cut, "mesh.dp=2", "resume=auto")) == [0, 0]
    losses = [[row["loss"] for row in rows(folder)] for folder in (one, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert [row["lr"] for row in rows(one)][3:5] == pytest.approx([3e-3, 1.65e-3])
    assert json.loads((one / "losses.json").read_text()).keys() == {"2", "4", "6", "8"}
    assert all(row["weight_norm"] > 0 for row in rows(one))
    config = json.loads((checkpoint_of(one, 8) / "config.json").read_text())
    assert config["model_type"] == "squared_relu" and config["relu_power"] == 2.0
    optimizer = load_file(checkpoint_of(one, 8) / "optimizer.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert optimizer[f"row.{name}"].shape == (48,) and optimizer[f"column.{name}"].shape == (32,)
    other = load_file(checkpoint_of(cut, 8) / "optimizer.safetensors")
    for key, state in optimizer.items():
        torch.testing.assert_close(other[key], state, rtol=1e-3, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- a data source

WRONG_ENTRIES = {
    "document: 3": r"data\.blend\[0\]\.document: no such key; did you mean 'documents'\?",
    "documents: many": r"data\.blend\[0\]\.documents=many: .*Integer",
    "dtype: uint32": r"data\.blend\[0\]\.dtype=uint32: data=counting does not use this key",
    "name: countng": r"data\.blend\[0\]\.name=countng: no such choice; did you mean 'counting'\?",
}


def blend(tmp_path: Path, *entries: str) -> Config:
    data = f"data.blend=[{','.join(f'{{{entry}}}' for entry in entries)}]"
    shape = ["data.tokenizer=byte", "train.seq_len=16", f"data.cache={tmp_path / 'cache'}"]
    return load_config(["recipe=llama_debug", PLUGIN, "data=blend", data, *shape])


def test_blend_accepts_plugin_source(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("jumps over the lazy dog " * 99)
    text_entry = f"name: text, path: {text}, validation: 0, weight: 1"
    data = open_data(blend(tmp_path, "name: counting, documents: 12, weight: 1", text_entry))
    alone = [PLUGIN, "data=counting", "data.documents=12", "data.tokenizer=byte", f"data.cache={tmp_path / 'cache'}"]
    expected = open_data(load_config(["recipe=llama_debug", *alone]))
    assert (data.train[0] == expected.train[0]).all() and len(data.train) == 2
    defaults = open_data(blend(tmp_path, "name: counting, weight: 1", text_entry))
    assert len(defaults.train[0]) > len(data.train[0])  # 40 documents, as the source's own config says


@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_a_blend_checks_the_keys_of_a_plugins_source(wrong, tmp_path):
    name = "" if wrong.startswith("name") else "name: counting, "
    with pytest.raises(ConfigError, match=WRONG_ENTRIES[wrong]):
        mixture_entries(blend(tmp_path, f"{name}{wrong}, weight: 1").data)


@pytest.mark.full
def test_prepare_reads_a_plugins_source(tmp_path, capsys):
    source = [PLUGIN, "data=counting", "data.documents=12", "data.tokenizer=byte", f"data.cache={tmp_path / 'cache'}"]
    assert prepare(["prepare", f"out={tmp_path / 'out'}", *source]) == 0
    direct = open_data(load_config(["recipe=llama_debug", *source]))
    shape = ["recipe=llama_debug", "data=bin", f"data.path={tmp_path / 'out'}"]
    assert open_data(load_config(shape)).fingerprint == direct.fingerprint
    assert json.loads((tmp_path / "out/manifest.json").read_text())["source"]["documents"] == 12
    assert prepare(["prepare", f"out={tmp_path / 'out'}", PLUGIN, "data=counting", "data.document=12"]) == 2
    assert "did you mean 'data.documents'?" in capsys.readouterr().err


def test_prepare_names_corpus_that_cannot_be_pickled():
    corpus = IterableCorpus("data=notes", 0.0, lambda: iter([("name", "text")]), "1", 4)
    with pytest.raises(ConfigError, match=r"data=notes: cannot be sent to a worker process .* top level of a module"):
        pickled(corpus)


# --------------------------------------------------------------------------------------------------------------- keys


def test_plugin_keys_are_typed(path):
    cfg = load_config([*PARTS, "optim.beta=0.5", "model.relu_power=3"])
    assert (cfg.optim.name, cfg.optim.beta, cfg.model.relu_power) == ("factored", 0.5, 3.0)
    assert (cfg.model.model_type, cfg.data.documents, cfg.callbacks["loss_file"].every) == ("squared_relu", 40, 2)
    with pytest.raises(ConfigError, match=r"optim\.beta"):
        load_config([*PARTS, "optim.beta=much"])


@pytest.mark.parametrize("override", MISSPELT)
def test_misspelt_plugin_key_names_near_miss(override):
    with pytest.raises(ConfigError, match=f"did you mean '{MISSPELT[override]}'"):
        load_config([*PARTS, override])


def test_attention_keys_are_typed_with_plugin_family():
    cfg = load_config([PLUGIN, "model=squared_relu", "model.attention=spaced", "model.spacing=5", "model.relu_power=3"])
    assert (cfg.model.attention, cfg.model.spacing, cfg.model.relu_power) == ("spaced", 5, 3.0)
    with pytest.raises(ConfigError, match=r"model\.spacing"):
        load_config([PLUGIN, "model.attention=spaced", "model.spacing=wide"])
    with pytest.raises(ConfigError, match=r"model\.spacing: Key 'spacing' not in"):
        load_config([PLUGIN, "model.spacing=5"])
    with pytest.raises(ConfigError, match=r"model\.attention=spacd: no such choice; did you mean 'spaced'\?"):
        resolve(load_config([PLUGIN, "model.attention=spacd"]), 1)


def test_config_json_names_plugin_attention():
    """transformers, which has no class for it, refuses it; ndtrain finds the mod and its keys again."""
    m = resolve(load_config([PLUGIN, "model.attention=spaced", "model.spacing=5"]), 1).model
    written = to_hf(m)
    assert (written["model_type"], written["attention"], written["spacing"]) == ("ndtrain_llama", "spaced", 5)
    read = from_hf(written)
    assert (read.attention, read.spacing) == ("spaced", 5) and not unknown_fields(written)
    assert "attention" not in to_hf(resolve(load_config([PLUGIN]), 1).model)
    with pytest.raises(ConfigError, match=r"init_from: attention=sparse in config.json: no plugin registers it"):
        from_hf({**written, "attention": "sparse"})


def test_plugin_names_are_suggested_as_choices():
    with pytest.raises(ConfigError, match="did you mean 'factored'"):
        load_config([PLUGIN, "optim=factred"])
    cfg = load_config([PLUGIN, "optim.schedule=stairs"])
    with pytest.raises(ConfigError, match="did you mean 'staircase'"):
        resolve(cfg, 1)


def test_a_recipe_may_name_plugins(tmp_path):
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /optim: factored\nplugins: [example_package.parts]\n"
    (tmp_path / "recipe/mine.yaml").write_text(text)
    assert load_config(["recipe=mine"], [str(tmp_path)]).optim.name == "factored"


# ------------------------------------------------------------------------------------------------------------- mistakes

BROKEN = {
    "there is no module": ("plugins=[no_such_package.parts]", None, "there is no module no_such_package"),
    "a mistake in it": ("plugins=[broken_plugin]", "x = 1 / 0\n", "ZeroDivisionError: division by zero (.*:1)"),
    "it lacks a module": ("plugins=[broken_plugin]", "import no_such\n", "No module named 'no_such'"),
    "names nothing": ("plugins=[broken_plugin]", "x = 1\n", "broken_plugin registers nothing"),
    "a name twice": (
        "plugins=[broken_plugin]",
        "from ndtrain.plugins import register_lr_schedule\n@register_lr_schedule('cosine')\ndef f(*_): return 1.0\n",
        "lr_schedule cosine is registered twice, by ndtrain.optim.lr_schedule and by broken_plugin",
    ),
    "a config of another kind": (
        "plugins=[broken_plugin]",
        "from dataclasses import dataclass\nfrom ndtrain.plugins import register_optimizer\n"
        "@dataclass\nclass C: x: int = 1\n@register_optimizer('o', config=C)\nclass O: pass\n",
        "optimizer o: its config C must be a dataclass that extends OptimConfig",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_plugin_mistake_is_one_line_error(mistake, tmp_path, monkeypatch, capsys):
    override, text, message = BROKEN[mistake]
    if text:
        (tmp_path / "broken_plugin.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    line = refusal(capsys, ["recipe=llama_debug", override, f"run.dir={tmp_path / 'run'}"])
    assert override in line
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), line), line


FAULTY = """
from dataclasses import dataclass
from ndtrain.config import ConfigError, DataConfig
from ndtrain.data import IterableCorpus
from ndtrain.engine.callbacks import Callback
from ndtrain.optim import AdamW
from ndtrain.plugins import register_callback, register_optimizer, register_source

@register_source("faulty")
def source(data):
    return IterableCorpus("data=faulty", 0.0, texts, "1", 4)

def texts():
    yield "a", "some text " * 400
    {}["texts"]

@register_source("missing")
def missing(data):
    return open(data.path)

@register_optimizer("faulty")
class Faulty(AdamW):
    def step(self, *args, **kwargs):
        {}["step"]

@register_callback("faulty")
class FaultyCallback(Callback):
    def on_report(self, report, metrics):
        if self.trainer.cfg.run.name == "callback":
            [].pop()  # in C, so that the innermost frame is the plugin's
"""
FAULTS = {  # overrides -> the error, and the function in which it is raised
    "source": (["data=missing", "data.path=/no/such.txt"], "FileNotFoundError: .*no/such.txt'"),
    "texts": (["data=faulty"], "KeyError: 'texts'"),
    "optimizer": (["optim=faulty"], "KeyError: 'step'"),
    "callback": (["run.name=callback"], "IndexError: pop from empty list"),
}


def faulty_run(folder: Path, fault: str) -> list[str]:
    (folder / "broken_plugin.py").write_text(FAULTY)
    text = ["data=text", f"data.path={write_corpus(folder / 'corpus.txt')}"]
    common = ["recipe=llama_debug", "plugins=[broken_plugin]", "data.tokenizer=byte", f"data.cache={folder / 'cache'}"]
    rest = ["logger=jsonl", "hardware.device=cpu", "hardware.peak_tflops=0.1", f"run.dir={folder / 'run'}"]
    return [*common, *text, *rest, *FAULTS[fault][0]]


@pytest.mark.parametrize("fault", FAULTS)
def test_exception_in_plugin_names_plugin_in_one_line(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(faulty_run(tmp_path, fault))
    line = one_error(capsys.readouterr().err)
    assert ended.value.code == 1
    assert re.match(rf"plugin broken_plugin: {FAULTS[fault][1]} \(.*/broken_plugin\.py:\d+\); the traceback", line), (
        line
    )
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert log.count("Traceback (most recent call last)") == 1 and "broken_plugin.py" in log
    status = exit_status.read(tmp_path / "run")
    assert (status.why, status.code, status.error) == ("failed", 1, line)


def test_an_error_outside_of_plugins_keeps_its_traceback(tmp_path, monkeypatch):
    """This also holds in a run that has loaded a plugin."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(TrainingStep, "forward_backward", lambda *args: [].pop())
    with pytest.raises(IndexError):
        main(faulty_run(tmp_path, "callback"))
    assert "Traceback" in exit_status.read(tmp_path / "run").error


@pytest.mark.full
def test_exception_in_plugin_on_two_ranks_is_one_line(tmp_path, monkeypatch):
    """torchrun shows the line as well, and no rank prints a traceback."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    argv = [sys.executable, "-m", "ndtrain.run.torchrun", "--standalone", "--nproc-per-node", "2"]
    args = [*faulty_run(tmp_path, "callback"), "mesh.fsdp=2"]
    done = subprocess.run([*argv, "-m", "ndtrain.train", *args], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert one_error(done.stderr).startswith("plugin broken_plugin: IndexError: pop from empty list")


@pytest.mark.full
def test_prepare_names_plugin_whose_source_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_plugin.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    source = ["plugins=[broken_plugin]", "data=faulty", "data.tokenizer=byte", f"data.cache={tmp_path / 'cache'}"]
    assert prepare(["prepare", f"out={tmp_path / 'out'}", *source]) == 2
    assert one_error(capsys.readouterr().err).startswith("plugin broken_plugin: KeyError: 'texts' (")


@pytest.mark.full
def test_evaluate_names_plugin_whose_source_fails(tmp_path, monkeypatch, capsys):
    """`evaluate` has no log, so it prints the traceback before that line."""
    run = arguments(tmp_path / "run", write_corpus(tmp_path / "corpus.txt"), "train.steps=1", "optim.warmup=0")
    assert main(run) == 0
    (tmp_path / "broken_plugin.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    source = ["plugins=[broken_plugin]", "data=faulty", f"data.cache={tmp_path / 'cache'}", "split=all"]
    monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path / "run"), *source])
    assert status_of_command(evaluate) == 1
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: plugin broken_plugin: KeyError: 'texts' (") and any("Traceback" in b for b in before)


# ---------------------------------------------------------------------------------------------------------- the page

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/plugin.md"
NOTES_WRONG = {
    "no path": ([], "data.path=None: no such file: name the SQLite database"),
    "no file": (["data.path={folder}/none.db"], "data.path={folder}/none.db: no such file: name the SQLite database"),
    "no table": (["data.path={folder}/notes.db", "data.table=letters"], "data.table=letters: .*no such table: letters"),
}


@pytest.mark.parametrize("wrong", NOTES_WRONG)
def test_documented_source_names_wrong_key(wrong, tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n# my_package/notes.py\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "broken_plugin.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with sqlite3.connect(tmp_path / "notes.db") as database:
        database.execute("create table notes (text)")
    overrides, message = NOTES_WRONG[wrong]
    args = ["recipe=llama_debug", "plugins=[broken_plugin]", "data=notes", f"run.dir={tmp_path / 'run'}"]
    line = refusal(capsys, [*args, "data.tokenizer=byte", *(o.format(folder=tmp_path) for o in overrides)])
    assert re.match(message.format(folder=tmp_path), line), line


# ------------------------------------------------------------------------------------------------------------- frozen


def test_a_resolved_configuration_is_frozen():
    cfg = resolve(load_config(["recipe=llama_debug"]), 1)
    for section, key in ((cfg, "resume"), (cfg.optim, "lr"), (cfg.mesh, "tp")):
        with pytest.raises(ConfigError, match="the configuration is frozen"):
            setattr(section, key, 2)
    changed = cfg.unfrozen()
    changed.optim.lr = 2.0
    assert cfg.optim.lr != 2.0 and resolve(cfg, 1) is cfg


def test_a_run_with_plugins_is_resumed_from_its_folder_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    started = load_config([*PARTS, "optim.beta=0.5", "logger=[jsonl,wandb]", f"run.dir={run}"])
    (run / "config.yaml").write_text(to_yaml(resolve(started, 1)))
    cfg = load_config(["resume=auto", f"run.dir={run}", "optim.lr=1"])
    assert (cfg.optim.name, cfg.optim.beta, cfg.optim.lr) == ("factored", 0.5, 1)
    assert (cfg.model.model_type, cfg.data.name, cfg.logger.name) == ("squared_relu", "counting", ["jsonl", "wandb"])
    assert load_config(["resume=auto", f"run.dir={run}", "optim=adamw"]).optim.name == "adamw"
