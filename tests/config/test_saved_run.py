"""A run folder is enough: `resume=auto run.dir=FOLDER` takes the configuration of the run from its config.yaml."""

from functools import cache
from pathlib import Path

import pytest

from ndtrain.config import Config, ConfigError, check_overrides, load_config, resolve, to_yaml
from ndtrain.config.saved_run import NAME, SavedRun
from ndtrain.run import launch_query

STARTED = ["recipe=llama_debug", "optim.lr=5e-3", "data.tokenizer=byte", "logger.project=mine", "run.name=first"]


def save(folder: Path, *overrides: str, ranks: int = 1) -> Path:
    """Writes the config.yaml of a run with these overrides, and a checkpoint's folder."""
    (folder / "checkpoints/step-00000004").mkdir(parents=True)
    (folder / NAME).write_text(saved_text(overrides, ranks).replace("FOLDER", str(folder)))
    return folder


@cache
def saved_text(overrides: tuple[str, ...], ranks: int) -> str:
    """The configuration of a run in FOLDER."""
    return to_yaml(resolve(load_config([*STARTED, "run.dir=FOLDER", *overrides]), ranks))


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tmp_path / "run")


def resumed(folder: Path, *overrides: str) -> Config:
    return load_config(["resume=auto", f"run.dir={folder}", *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    (line,) = str(caught.value).splitlines()
    return line


# ------------------------------------------------------------------------------------------------------ from the folder


@pytest.mark.parametrize("where", ["", "/", "/checkpoints", "/checkpoints/step-00000004"])
def test_resume_path_loads_configuration_of_run(where, folder):
    cfg = load_config([f"resume={folder}{where}", "train.steps=90"])
    assert (cfg.optim.lr, cfg.train.steps, cfg.model.hidden_size, cfg.run.name) == (5e-3, 90, 64, "first")
    assert cfg.run.dir == str(folder), "it does not go on in the folder"


def test_resume_auto_loads_whole_configuration(folder, tmp_path):
    saved = (folder / NAME).read_text()
    assert to_yaml(resolve(resumed(folder), 1)).replace("resume: auto", "resume: none") == saved
    moved = folder.rename(tmp_path / "moved")
    assert resumed(moved).run.dir == str(moved)


def test_run_dir_may_reference_overridden_keys_only(folder):
    assert load_config(["resume=auto", f"run.dir={folder.parent}/${{run.name}}", "run.name=run"]).optim.lr == 5e-3
    line = refused("resume=auto", f"run.dir={folder.parent}/${{optim.lr}}")
    assert "write the path without it" in line


def test_overrides_change_resumed_configuration(folder):
    cfg = resumed(folder, "optim.lr=1", "schedule=zb_h1", "logger=jsonl", "layout.rules.vocab=null")
    assert (cfg.optim.lr, cfg.schedule.name, cfg.logger.name, cfg.layout.rules["vocab"]) == (1, "zb_h1", "jsonl", None)
    assert cfg.logger.project == "mine", "an option of a group sets more than its file says"
    other = resumed(folder, "model=llama_small")
    assert (other.model, other.data.vocab_size) == (load_config(["model=llama_small"]).model, other.model.vocab_size)


def test_named_recipe_replaces_saved_configuration(folder):
    assert resumed(folder, "recipe=llama_small").optim.lr == load_config(["recipe=llama_small"]).optim.lr


def test_mesh_dependent_defaults_are_derived_again(tmp_path):
    whole = ["train.micro_batch=null", "train.global_batch=8"]
    wide = save(tmp_path / "wide", *whole, "mesh.fsdp=2", ranks=2)
    cfg = resolve(resumed(wide, "mesh.fsdp=-1"), 8)
    assert (cfg.mesh.fsdp, cfg.train.micro_batch) == (8, 1)
    cfg = resolve(resumed(wide, "mesh.fsdp=1", "mesh.pp=2"), 2)
    assert (cfg.mesh.zero, cfg.train.micro_batch) == (1, 2)
    given = save(tmp_path / "given", *whole[1:], "train.micro_batch=2", "mesh.zero=2", "mesh.fsdp=2", ranks=2)
    cfg = resolve(resumed(given, "mesh.fsdp=-1"), 1)
    assert (cfg.mesh.zero, cfg.train.micro_batch) == (2, 2), "what was given is lost"


def test_launch_query_prints_folder_of_resumed_run(folder, capsys):
    assert launch_query.main(["folder", f"resume={folder}/checkpoints"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)


def test_resume_auto_in_new_folder_uses_named_recipe(tmp_path):
    assert resumed(tmp_path, "model=llama_small").model.hidden_size == 256
    assert resumed(tmp_path, "recipe=llama_small").model.hidden_size == 256


NOTHING = {  # overrides -> words of the error
    "an empty folder": (["resume=auto", "run.dir=HERE"], ["run.dir=HERE holds no run", "recipe=NAME"]),
    "no folder": (["resume=auto", "run.dir=HERE/none"], ["run.dir=HERE/none holds no run", "run.dir=FOLDER"]),
    "no path": (["resume=HERE/none"], ["resume=HERE/none: does not exist"]),
    "another folder": (["resume=HERE"], ["resume=HERE: holds no run with a config.yaml", "recipe=NAME"]),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_folder_without_a_run_is_refused(name, tmp_path):
    overrides, words = ([text.replace("HERE", str(tmp_path)) for text in texts] for texts in NOTHING[name])
    line = refused(*overrides)
    assert all(word in line for word in words), line


def test_sweep_over_resumed_runs_is_refused(folder):
    for overrides in (["resume=auto", f"run.dir={folder},other"], [f"resume={folder},auto"]):
        with pytest.raises(ConfigError, match=r"jobs of this sweep resume different runs.*recipe=NAME"):
            check_overrides(overrides, hydra=True)
    given = check_overrides([f"resume={folder}", "optim.lr=1,2", "run.dir=x-${optim.lr}"], hydra=True)
    assert given[-1].startswith("recipe="), "the jobs do not start from the run"


# ----------------------------------------------------------------------------------------------------------- the file


def test_error_names_all_keys_of_other_version(folder):
    text = (
        (folder / NAME)
        .read_text()
        .replace("optim:\n", "optim:\n  momenta: 3\n")
        .replace("run:\n", "gone: {a: 1}\nrun:\n")
    )
    (folder / NAME).write_text(text)
    line = refused("resume=auto", f"run.dir={folder}")
    assert line.startswith(f"{folder / NAME}: ") and "gone.a, optim.momenta" in line and "recipe" in line
    (folder / NAME).write_text((folder / NAME).read_text().replace("  momenta: 3\n", "").replace("gone: {a: 1}\n", ""))
    assert resumed(folder).optim.lr == 5e-3


def test_keys_missing_in_older_file_get_defaults(folder):
    (folder / NAME).write_text((folder / NAME).read_text().replace("  keep_every: 0\n", ""))
    assert resumed(folder).checkpoint.keep_every == 0


DAMAGES = {  # content of config.yaml, with SAVED for the right one -> words of the error
    "empty": ("", ["the section `run` is missing"]),
    "a list": ("[1, 2]", ["contains a list"]),
    "text": ("run", ["config.yaml"]),
    "no sections": ("run: 3\nmodel: 4", ["the section `run` is missing"]),
    "a section with a value": ("SAVED\noptim: 3", ["config.yaml", "optim"]),
    "a bracket": ("SAVED\n{", ["not valid YAML"]),
    "binary": ("\0\1\2", ["not valid YAML"]),
    "deep": ("[" * 50_000, ["nest"]),
    "deep blocks": ("\n".join(" " * n + "a:" for n in range(300)), ["nested too deeply"]),
    "huge": ("a: " + "b" * (1 << 20), ["more than 1,048,576 bytes"]),
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ["it contains YAML aliases"]),
    "a reference": ("SAVED\nx: ${oc.env:HOME}", ["x=${oc.env:HOME}", "no references"]),
    "a number": ("TYPO", ["train.steps=many", "whole number"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_error_names_unusable_configuration_file(name, folder):
    content, words = DAMAGES[name]
    saved = (folder / NAME).read_text()
    content = content.replace("SAVED", saved).replace("TYPO", saved.replace("  steps: 20", "  steps: many"))
    (folder / NAME).write_text(content)
    line = refused("resume=auto", f"run.dir={folder}")
    assert str(folder / NAME) in line and all(word in line for word in words), line
    assert len(line) < 1000, "the file is in the message"


def test_reference_in_checkpoint_configuration_is_refused():
    """`evaluate` takes its configuration from state.json, which may be a stranger's."""
    saved = SavedRun({"run": {"name": "${oc.env:HOME}"}}, "state.json", follows=False)
    with pytest.raises(ConfigError, match=r"run\.name=.*no references"):
        load_config(["mesh.fsdp=-1"], base=saved)
