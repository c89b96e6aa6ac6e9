"""The `--help` texts of the commands that accept a run's overrides."""

import sys
import textwrap
from collections.abc import Sequence

from ndtrain.config.keys import Key, config_folders, group_options, known_keys
from ndtrain.run.commands import PLANS

_WIDTH = 118
_GROUPS = {  # group -> description for `--help`
    "recipe": "a complete run; other overrides change it",
    "model": "architecture and sizes",
    "data": "source of the tokens",
    "objective": "the loss",
    "optim": "optimizer",
    "schedule": "order of forward and backward passes, with mesh.pp",
    "recompute": "activations that are recomputed instead of kept",
    "logger": "where metrics go, in addition to metrics.jsonl",
    "hardware": "the device's peak, for MFU",
}

_TRAIN = """Trains a transformer on any mesh of pp x dp x fsdp x cp x tp.

usage: {command} [KEY=VALUE ...] [--config-dir FOLDER] [--multirun]
       torchrun --nproc-per-node N -m ndtrain.train [KEY=VALUE ...]     one process per rank; N: product of all mesh.*

examples:
  {command} recipe=llama_debug
      takes a few seconds on one CPU core
  {command} recipe=llama_small run.dir=runs/first train.steps=100 optim.lr=1e-3
  {command} run.dir=runs/first resume=auto
      resumes that run, with the config.yaml of its folder
  torchrun --nproc-per-node 4 -m ndtrain.train recipe=llama_small mesh.fsdp=2 mesh.tp=-1
      -1: all remaining ranks
  {command} recipe=llama_small data=text data.path=my_texts/ data.tokenizer=bpe
  {command} --multirun recipe=llama_debug optim.lr=1e-3,3e-3 'run.dir=runs/lr-${{optim.lr}}'
  {command} --config-dir mine recipe=big
      your own recipe, mine/recipe/big.yaml, whose first line has to be `# @package _global_`

groups, GROUP=OPTION; an option sets several keys:
{groups}

keys, KEY=VALUE; the first keys of each section:
{sections}
  A list needs brackets, and quotes in a shell: 'optim.betas=[0.9,0.95]'. null means no value.

flags:
  --config-dir FOLDER      your own recipes and other groups: FOLDER/recipe/NAME.yaml (-cd)
  --cfg job [--resolve]    shows the configuration instead of training (-c); --package optim: one section
  --multirun               a run for each combination of values separated by commas (-m)
  --info defaults          shows the files that the configuration is composed of (-i)
  -sc install=SHELL        Tab completion for ndtrain in bash, zsh or fish: eval "$(ndtrain train -sc install=bash)",
                           or zsh; in fish: ndtrain train -sc install=fish | source
  --hydra-help             the help of Hydra, which composes the configuration
  --version, --help

reference: docs/configuration.md (every key), docs/quickstart.md, docs/launch.md (hosts, stopping, exit codes)"""

_PREFLIGHT = """Checks hosts, devices, storage, clocks, collectives and links before an expensive run.

usage: torchrun --nproc-per-node N -m ndtrain.preflight [the run's own KEY=VALUE ...] [--config-dir FOLDER]
       {command} [KEY=VALUE ...]                           one process

examples:
  torchrun --nproc-per-node 8 -m ndtrain.preflight recipe=llama3_8b mesh.fsdp=8
  {command} recipe=llama_small                             checks this host for a run of one process

It checks that all ranks have the same versions, source code and configuration; that their devices are equal, and
compute a matmul correctly and equally fast; that the run folder is writable, is shared by all hosts and has room for
the checkpoints; that clocks agree; that collectives over each axis are correct; and that all links are equally fast.
It prints one table, which names the rank or link that differs.

exit status: 0 if no check failed, 1 if a check failed, 2 if the configuration is wrong

It takes the overrides of the run: `python -m ndtrain.train --help`. reference: docs/launch.md"""

_PLAN = """Predicts the memory and speed of a run, and finds its best mesh, without its machines.

usage: {command} PLAN [the plan's own KEY=VALUE ...] [the run's own KEY=VALUE ...]

plans:
{plans}

examples:
{examples}

exit status: 0, or 2 if the plan cannot be made

`{command} PLAN --help` lists the keys of a plan, `python -m ndtrain.train --help` the keys of a run.
reference: docs/plan.md"""

_ONE_PLAN = """usage: {command} {plan} [KEY=VALUE ...]

{text}

examples:
{examples}

keys:
{options}

exit status: 0, or 2 if the plan cannot be made

The overrides of a run: `python -m ndtrain.train --help`. reference: docs/plan.md"""


def train(search: Sequence[str] = ()) -> str:
    """Return the help of `ndtrain train`, with the groups and options of this installation and the folders `search`."""
    options = group_options(config_folders(list(search)))
    groups = [_row(group, f"{', '.join(sorted(options[group]))}: {text}") for group, text in _GROUPS.items()]
    keys = known_keys()
    sections = [
        _row(f"{name}.*", _some_keys(name, keys)) for name, key in keys.items() if key.section and name != "callbacks"
    ]
    top = [name for name, key in keys.items() if not key.section and "." not in name]
    sections.append(_row("", ", ".join(top)))
    return _TRAIN.format(command=command("train"), groups="\n".join(groups), sections="\n".join(sections))


def preflight(search: Sequence[str] = ()) -> str:
    """Return the help of `ndtrain preflight`."""
    return _PREFLIGHT.format(command=command("preflight"))


def plans() -> str:
    """Return the help of `ndtrain plan`."""
    examples = [_plan_call(name, plan.examples[0]) for name, plan in PLANS.items()]
    rows = [_row(name, plan.text) for name, plan in PLANS.items()]
    return _PLAN.format(command=command("plan"), plans="\n".join(rows), examples="\n".join(examples))


def plan(name: str, options: str) -> str:
    """Return the help of one plan, with the lines of its options."""
    text, examples = PLANS[name]
    return _ONE_PLAN.format(
        command=command("plan"), plan=name, text=textwrap.fill(text[0].upper() + text[1:] + ".", _WIDTH),
        examples="\n".join(_plan_call(name, example) for example in examples), options=options,
    )  # fmt: skip


def _plan_call(name: str, args: str) -> str:
    return f"  {command('plan')} {name} {args}"


def command(name: str) -> str:
    """Return the command as the user has called it: `ndtrain train`, or `python -m ndtrain.train`."""
    return f"ndtrain {name}" if sys.argv[0] == f"ndtrain {name}" else f"python -m ndtrain.{name}"


def _some_keys(section: str, keys: dict[str, Key], count: int = 6) -> str:
    names = [key.removeprefix(f"{section}.") for key in keys if key.startswith(f"{section}.")]
    names = [name for name in names if name != "name" or section == "run"]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _row(head: str, text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - 16, break_on_hyphens=False)
    return f"  {head:14}" + ("\n" + " " * 16).join(lines)
