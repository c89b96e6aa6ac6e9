"""Measures this trainer against its peers, and single parts of it.

python -m ndtrain.bench <bench> [key=value ...]
python -m ndtrain.bench <bench> --help

{benches}
"""

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ndtrain.arguments import ArgumentError, help_lines, one_of, parse, status_of, wants_help
from ndtrain.config import ConfigError, world_from_env
from ndtrain.measure.ranks import RankFailed, WrongResult, exit_process
from ndtrain.run.checkout import LAB, from_checkout
from ndtrain.run.launcher_report import record_error

BENCHES = {  # bench -> its module, and an example of its keys
    "peers": (LAB["peers"], "axis=one|dp|fsdp|tp|cp|pp"),
    "step": ("ndtrain.bench.step", 'recipe=llama_small [cases="OVERRIDES | OVERRIDES" profile=true]'),
    "gpu": (LAB["gpu"], "[suite=h200|h100|smoke]"),
    "collectives": (
        "ndtrain.measure.collectives.run",
        '[mesh="dp=2 tp=2" max=1GiB plot=FILE.png | demo=true], also under torchrun',
    ),
    "matmul": ("ndtrain.bench.matmul", "[max=4096 plot=FILE.png]"),
    "moe": ("ndtrain.bench.moe", "[experts=8,64 tokens=4096]"),
    "optim": ("ndtrain.bench.optim", '[ranks=2 axis=fsdp overrides="optim=muon"]'),
    "offload": ("ndtrain.bench.offload", "[moments=bf16 threads=2]"),
    "checkpoint": ("ndtrain.bench.checkpoint", "[ranks=4 gigabytes=1]"),
}


def main(args: Sequence[str]) -> int:
    """Run the bench that `args` name. Return the exit status: 0, or 1 for a failure, or 2 for bad arguments (with a
    line on stderr)."""
    try:
        if args and wants_help(args[:1]):
            print(usage())
            return 0
        name = one_of("bench", args[0] if args else "", list(BENCHES))
        module = module_of(name, args[1:])
        if wants_help(args):
            print(usage_of(name, module))
            return 0
        module.run(parse(module.Options, args[1:]))
        return 0
    except (ArgumentError, ConfigError) as error:
        record_error(str(error))
        if world_from_env()[0] > 0:  # rank 0 prints it; exiting now could make torchrun end rank 0 before
            time.sleep(1)
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except (RankFailed, WrongResult) as error:
        record_error(str(error))
        print(f"error: {error}", file=sys.stderr)
        return 1


def module_of(name: str, args: Sequence[str]) -> ModuleType:
    """Return the module of a bench. `peers axis=cp` compares attention only, other axes whole steps; their keys
    differ."""
    module = LAB["attention"] if name == "peers" and "axis=cp" in args else BENCHES[name][0]
    return from_checkout(module) if module in LAB.values() else import_module(module)


def usage() -> str:
    lines = [f"  {name:12} {example}" for name, (_, example) in BENCHES.items()]
    return (__doc__ or "").format(benches="\n".join(lines)).strip()


def usage_of(name: str, module: ModuleType) -> str:
    more = "\n\n`peers axis=cp --help` has the options of axis=cp." if module.__name__ == LAB["peers"] else ""
    about = (module.__doc__ or "").partition("Shape legend")[0].strip()
    return f"python -m ndtrain.bench {name} {BENCHES[name][1]}\n\n{about}\n\n{help_lines(module.Options)}{more}"


if __name__ == "__main__":
    exit_process(status_of(main))
