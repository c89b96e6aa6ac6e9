"""Every mistake in an own recipe, an override or a flag, and the one line that it prints."""

from pathlib import Path

import pytest

from ndtrain import compose
from ndtrain.config import ConfigError, load_config
from ndtrain.run import cli, launcher_report
from tests.lib.helpers import refusal

GLOBAL = "# @package _global_\n"
LLAMAS = "llama3_2_1b, llama3_2_3b, llama3_405b, llama3_70b, llama3_8b, llama_debug, llama_small"
QWENS = "qwen3_0_6b, qwen3_14b, qwen3_1_7b, qwen3_30b_a3b, qwen3_32b, qwen3_4b, qwen3_8b"
MODELS = f"deepseek_v3, {LLAMAS}, mistral_7b, mixtral_8x7b, moe_debug, moe_small, {QWENS}"
SHIPPED = f"known: chat, continued, {MODELS}".replace("llama3_405b,", "llama3_405b, llama3_405b_long,")
WITH_OWN = SHIPPED.replace("moe_small,", "moe_small, own,")
GROUPS = "checkpoint, data, hardware, logger, mesh, model, objective, optim, recipe, recompute, schedule"
RECIPES = {  # content of the recipe -> the line; {file} is its path
    "misspelt key": (
        f"{GLOBAL}train:\n  stepz: 5\n",
        "{file}:3: train.stepz: no such key; did you mean 'train.steps'? `--cfg job` lists them all",
    ),
    "misspelt section": (
        f"{GLOBAL}trian:\n  steps: 5\n",
        "{file}:2: trian: no such key; did you mean 'train'? `--cfg job` lists them all",
    ),
    "no package": (
        "train:\n  steps: 5\n",
        "{file}: its first line must be `# @package _global_`, or its keys are placed under `recipe`",
    ),
    "empty": (
        "",
        "{file}: its first line must be `# @package _global_`, or its keys are placed under `recipe`",
    ),
    "a word for a number": (
        f"{GLOBAL}train:\n  seq_len: 8\n  steps: many\n",
        "{file}:4: train.steps=many: must be a whole number",
    ),
    "a word for true or false": (
        f"{GLOBAL}tp:\n  overlap: often\n",
        "{file}:3: tp.overlap=often: must be true or false",
    ),
    "nothing where a number must be": (
        f"{GLOBAL}train:\n  steps: null\n",
        "{file}:3: train.steps=null: must have a value",
    ),
    "a value for a section": (
        f"{GLOBAL}train: 5\n",
        "{file}:2: train: a section cannot have a value: set its keys, as in train.steps",
    ),
    "indentation": (
        f"{GLOBAL}train:\n  steps: 5\n bad: 1\n",
        "{file}:4:2: not YAML: expected <block end>, but found '<block mapping start>' (look at the indentation, "
        "colons and brackets here and just above)",
    ),
    "tab": (f"{GLOBAL}train:\n\tsteps: 5\n", "{file}:3:1: not YAML: a tab; indent with spaces"),
    "the same key twice": (
        f"{GLOBAL}train:\n  steps: 5\n  steps: 6\n",
        "{file}:4:3: not YAML: found duplicate key steps",
    ),
    "a list": (f"{GLOBAL}- a\n", "{file}: contains a list: write `key: value` lines"),
    "a model that there is not": (
        f"{GLOBAL}defaults:\n  - override /model: llama_smal\n",
        f"{{file}}:3: model: llama_smal: no such model; did you mean 'llama_small'? known: {MODELS}",
    ),
    "a group that there is not": (
        f"{GLOBAL}defaults:\n  - override /modle: llama_small\n",
        f"{{file}}:3: override /modle: no such group; did you mean 'model'? known: {GROUPS}",
    ),
    "a group without override": (
        f"{GLOBAL}defaults:\n  - override /data: text\n  - /model: llama_small\n",
        "{file}:4: /model: already chosen: write `override /model: ...` in the defaults list",
    ),
    "the default's group, without override": (
        f"{GLOBAL}defaults:\n  - /model: llama_debug\n",
        "{file}:3: /model: already chosen: write `override /model: ...` in the defaults list",
    ),
    "a group without slash": (
        f"{GLOBAL}defaults:\n  - model: llama_small\n",
        "{file}:3: model: in a defaults list a group begins with a slash: write `override /model: llama_small`",
    ),
    "an overridden group without slash": (
        f"{GLOBAL}defaults:\n  - override model: llama_small\n",
        "{file}:3: model: in a defaults list a group begins with a slash: write `override /model: ...`",
    ),
    "no package, with a group": (
        "defaults:\n  - override /model: llama_small\ntrain:\n  steps: 5\n",
        "{file}: its first line must be `# @package _global_`, or its keys are placed under `recipe`",
    ),
    "a base recipe that there is not": (
        f"{GLOBAL}defaults:\n  - llama_smal\n",
        f"{{file}}:3: recipe: llama_smal: no such recipe; did you mean 'llama_small'? {WITH_OWN}",
    ),
    "itself as its base": (
        f"{GLOBAL}defaults:\n  - own\n",
        "{file}: its defaults list includes the file itself: name another recipe there",
    ),
    "defaults that are no list": (
        f"{GLOBAL}defaults:\n  model: llama_small\n",
        "{file}: defaults: must be a list, as in `- override /model: llama_small` on the line below",
    ),
    "a dotted key": (
        f"{GLOBAL}train.steps: 5\n",
        "{file}:2: train.steps: keys are nested in a file: write `steps:` indented under `train:`",
    ),
    "an interpolation that does not close": (
        f"{GLOBAL}train:\n  steps: ${{train.seq_len\n",
        "{file}:3: train.steps: invalid reference (no viable alternative at input '${{train.seq_len'): write it as "
        "${{run.name}}",
    ),
    "an interpolation of no key": (
        f"{GLOBAL}train:\n  steps: ${{train.seqlen}}\n",
        "{file}:3: train.steps: ${{train.seqlen}} refers to an unknown key; did you mean 'train.seq_len'? `--cfg job` "
        "lists them all",
    ),
    "one value for a list": (
        f"{GLOBAL}mesh:\n  order: dp\n",
        "{file}:3: mesh.order: a list needs brackets: `[...]`",
    ),
    "a plugin that is no list": (
        f"{GLOBAL}plugins: my.module\n",
        "{file}: plugins=my.module: a list needs brackets: 'plugins=[my.module]'",
    ),
}  # fmt: skip

COMMANDS = {  # arguments -> the line; {dir} is a folder of the user's
    "sweep of numbers": (
        ["optim.lr=1e-3,3e-3"],
        "optim.lr=1e-3,3e-3: several values, with a run for each, need --multirun; quote it if it is "
        "one value: 'optim.lr=\"1e-3,3e-3\"'",
    ),
    "sweep by choice()": (
        ["optim.lr=choice(1,2)"],
        "optim.lr=choice(1,2): several values, with a run for each, need --multirun",
    ),
    "sweep of a group": (
        ["model=llama_debug,llama_small"],
        "model=llama_debug,llama_small: several values, with a run for each, need --multirun; quote it if it is "
        "one value: 'model=\"llama_debug,llama_small\"'",
    ),
    "list without brackets": (
        ["mesh.order=dp,fsdp"],
        "mesh.order=dp,fsdp: a list needs brackets: 'mesh.order=[dp,fsdp]'",
    ),
    "loggers without brackets": (
        ["logger=wandb,tensorboard"],
        "logger=wandb,tensorboard: a list needs brackets: 'logger=[wandb,tensorboard]'",
    ),
    "one value for a list": (["logger.tags=a"], "logger.tags=a: a list needs brackets: 'logger.tags=[a]'"),
    "a plugin without brackets": (
        ["plugins=my.module"],
        "plugins=my.module: a list needs brackets: 'plugins=[my.module]'",
    ),
    "a blend of numbers": (
        ["data=blend", "data.blend=[3]"],
        "data.blend: an entry must be keys with values, as in {name: text, weight: 1}, not int",
    ),
    "a recipe chosen twice": (
        ["+recipe=llama_debug", "recipe=llama_small"],
        "recipe: chosen twice; write recipe=... without a plus",
    ),
    "value for a section": (
        ["train=5"],
        "train=5: train is a section and cannot have a value: set its keys, as in train.steps=...",
    ),
    "no value": (["mesh.fsdp"], "mesh.fsdp: an override is key=value; give mesh.fsdp a value: mesh.fsdp=VALUE"),
    "an option alone": (
        ["llama_small"],
        "llama_small: an override is key=value; did you mean 'recipe=llama_small'?",
    ),
    "open bracket": (
        ["mesh.order=[dp"],
        "mesh.order=[dp: cannot read the override (no viable alternative at input '[dp'); close brackets and quotes, "
        "and put a value with special characters in its own quotes: 'mesh.order=\"[dp\"'",
    ),
    "no entries": (
        ["optim.lr_mult={}"],
        "optim.lr_mult={}: has no effect, since entries are added to the recipe's; use optim.lr_mult=null to remove "
        "them",
    ),
    "entries of null": (
        ["optim.lr_mult=null", "optim.lr_mult={lm_head.weight:2}"],
        "optim.lr_mult={lm_head.weight:2}: a file or an earlier override sets this key to null, "
        "so entries cannot be added: remove the null",
    ),
    "an entry of null": (
        ["model.rope_scaling=null", "model.rope_scaling.factor=8"],
        "model.rope_scaling.factor=8: a file or an earlier override sets this key to null, "
        "so entries cannot be added: remove the null",
    ),
    "deletion of an optional key": (
        ["~train.profile"],
        "~train.profile: cannot delete train.profile, a key of the schema; use train.profile=null to disable it",
    ),
    "deletion of a key": (
        ["~train.steps"],
        "~train.steps: cannot delete train.steps, a key of the schema; remove this override to keep its value",
    ),
    "deletion of no key": (
        ["~train.stepz"],
        "~train.stepz: no such key; did you mean 'train.steps'? `--cfg job` lists them all",
    ),
    "deletion of a group": (
        ["~logger"],
        "~logger: cannot delete a group; choose another option: logger=jsonl/tensorboard/wandb",
    ),
    "deletion of a rule": (
        ["~layout.rules.mlp"],
        "~layout.rules.mlp: cannot delete layout.rules.mlp: its default would apply again. Use layout.rules.mlp=null "
        "to disable it",
    ),
    "hydra.run.dir": (
        ["hydra.run.dir=out/1"],
        "hydra.run.dir=out/1: ndtrain has its own key for the run folder: use run.dir=out/1",
    ),
    "hydra.searchpath": (
        ["hydra.searchpath=[mine]"],
        "hydra.searchpath=[mine]: use --config-dir FOLDER, where FOLDER/recipe/ holds your recipes",
    ),
    "hydra.mode": (
        ["hydra.mode=MULTIRUN"],
        "hydra.mode=MULTIRUN: a setting of Hydra that has no effect on a single run: use --multirun",
    ),
    "launcher of a single run": (
        ["hydra/launcher=submitit_slurm"],
        "hydra/launcher=submitit_slurm: a setting of Hydra that has no effect on a single run: remove it, or add "
        "--multirun",
    ),
    "interpolation of Hydra": (
        ["run.name=${hydra:runtime.output_dir}"],
        "run.name: ${hydra:runtime.output_dir} is not available here; use a key of the run, e.g. ${run.name}",
    ),
    "interpolation of no key": (
        ["run.name=${run.nam}"],
        "run.name: ${run.nam} refers to an unknown key; did you mean 'run.name'? `--cfg job` lists them all",
    ),
    "missing recipe": (
        ["recipe=llama_smal"],
        f"recipe=llama_smal: no such recipe; did you mean 'llama_small'? {SHIPPED}",
    ),
    "recipe by its file": (
        ["recipe={dir}/recipe/own.yaml"],
        "recipe={dir}/recipe/own.yaml: no such recipe; use --config-dir FOLDER recipe=own for the file "
        f"FOLDER/recipe/own.yaml; {SHIPPED}",
    ),
    "recipe by its file's name": (
        ["--config-dir", "{dir}", "recipe=own.yaml"],
        "recipe=own.yaml: no such recipe; write recipe=own, without folder and ending; "
        f"{WITH_OWN}",
    ),
    "recipe in the wrong folder": (
        ["--config-dir", "{dir}", "recipe=stray"],
        "recipe=stray: no such recipe; move {dir}/stray.yaml into {dir}/recipe/; "
        f"{WITH_OWN}",
    ),
    "multirun, a word for a number": (
        ["--multirun", "train.steps=5,many"],
        "job 2 of 2 (train.steps=many), none has started: train.steps=many: must be a whole number",
    ),
    "multirun, a value out of bounds": (
        ["-m", "train.steps=0,30", "run.seed=1,2"],
        "job 1 of 4 (train.steps=0 run.seed=1), none has started: train.steps=0: must be at least 1",
    ),
    "multirun, an option that there is not": (
        ["--multirun", "schedule=1f1b,2f2b"],
        "schedule=2f2b: no such schedule; did you mean '1f1b'? known: 1f1b, csv, dualpipe_v, gpipe, interleaved, "
        "zb_h1, zb_v",
    ),
    "multirun, hydra.run.dir": (
        ["--multirun", "hydra.run.dir=out"],
        "hydra.run.dir=out: ndtrain has its own key for the run folder: use run.dir=out",
    ),
    "multirun, a deadline out of bounds": (
        ["-m", "hardware.timeout_s=-3,600"],
        "job 1 of 2 (hardware.timeout_s=-3), none has started: hardware.timeout_s=-3.0: must be at least 1",
    ),
    "show, a word for a number": (["--cfg", "job", "train.steps=many"], "train.steps=many: must be a whole number"),
    "show what": (["--cfg=jobs"], "--cfg jobs: did you mean 'job'? known: job, hydra, all"),
    "two flags": (["--cfg", "job", "--multirun"], "--cfg and --multirun: use only one of them"),
    "resolve what": (["--resolve"], "--resolve works only with --cfg job"),
    "flag without its value": (["--cfg"], "--cfg needs a value, as in --cfg job|hydra|all"),
}  # fmt: skip


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder for --config-dir with one recipe, own, and a file that stands in the wrong place."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/own.yaml").write_text(f"{GLOBAL}train:\n  steps: 7\n")
    (tmp_path / "stray.yaml").write_text(GLOBAL)
    return tmp_path


@pytest.mark.parametrize("name", RECIPES)
def test_mistake_in_own_recipe_is_one_line_error(name, own):
    content, line = RECIPES[name]
    file = own / "recipe/own.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        load_config(["recipe=own"], [str(own)])
    assert str(refused.value) == line.format(file=file)


@pytest.mark.parametrize("name", COMMANDS)
def test_mistake_on_command_line_is_one_line_error(name, own, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])
    args, line = COMMANDS[name]
    fill = lambda text: text.replace("{dir}", str(own))
    ran: list = []
    monkeypatch.setattr(launcher_report, "record_error", ran.append)
    assert refusal(capsys, [fill(arg) for arg in args]) == fill(line)
    assert ran == [fill(line)], "torchrun is told another line"


def test_cfg_flag_prints_same_error_line(own, capsys, monkeypatch):
    """`--cfg` is Hydra's; the error of the file is ours."""
    monkeypatch.setattr("sys.argv", ["train"])
    content, line = RECIPES["misspelt key"]
    file = own / "recipe/own.yaml"
    file.write_text(content)
    assert refusal(capsys, ["--config-dir", str(own), "recipe=own", "--cfg", "job"]) == line.format(file=file)


def test_recipe_named_like_shipped_one_is_refused(own):
    file = own / "recipe/llama_debug.yaml"
    file.write_text(GLOBAL)
    with pytest.raises(ConfigError, match=f"recipe=llama_debug: two files have this name, .* and {file}: rename yours"):
        load_config(["recipe=llama_debug"], [str(own)])


def test_valid_overrides_are_accepted(own):
    """A key of a free-form dict can be deleted, a quoted comma is one value, and `${hydra:...}` has values."""
    cfg = load_config(
        [
            "recipe=own",
            "model=llama3_2_1b",
            "~model.rope_scaling.factor",
            "data.path='a,b'",
            "run.name=${hydra:runtime.choices.model}-7",
        ],
        [str(own)],
    )
    assert (cfg.train.steps, cfg.data.path, cfg.run.name) == (7, "a,b", "llama3_2_1b-7")
    assert "rope_type" in cfg.model.rope_scaling and "factor" not in cfg.model.rope_scaling


def test_valid_sweep_runs_every_job(own, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.chdir(own)
    steps: list[tuple[int, int]] = []
    train = lambda cfg: steps.append((cfg.train.steps, cfg.run.seed)) or len(steps)
    args = ["--config-dir", str(own), "--multirun", "recipe=own", "train.steps=20,30"]
    assert cli.main(train, args) == 2
    assert steps == [(20, 0), (30, 0)]


@pytest.mark.parametrize("other", [["recipe=llama_debug"], [], {"recipe": "llama_debug"}], ids=repr)
def test_compose_refuses_non_strings(other):
    with pytest.raises(ConfigError, match=f"not a {type(other).__name__}: call compose"):
        compose(other)
