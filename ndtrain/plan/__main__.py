"""python -m ndtrain.plan dry recipe=llama3_8b hardware=h100 nodes=4 mesh.tp=8      # --help says more"""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ndtrain.arguments import ArgumentError, help_lines, one_of, wants_help
from ndtrain.config import Config, ConfigError, resolve
from ndtrain.engine.setup import model_of_folder
from ndtrain.plan import report
from ndtrain.plan.dry import dry_run, plan_alike, stages_at
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import Options, split_options, world_of
from ndtrain.runtime import cli, usage
from ndtrain.runtime.commands import PLANS


def main(args: Sequence[str]) -> int:
    """Runs a plan. The exit status: 2 where it cannot be made (one line says why)."""
    if not args or wants_help(args):
        print(usage.plan(help_lines(Options)), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    try:
        one_of("plan", args[0], PLANS)
        options, overrides = split_options(args[1:])
        hardware = load_hardware(options.hardware)
        cfg = planned_config(overrides, options, hardware)
        show(cfg, options, hardware)
        return 0
    except (ArgumentError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def planned_config(overrides: Sequence[str], options: Options, hardware: Hardware) -> Config:
    """The resolved configuration of the run that is planned.

    Raises:
        ConfigError: there is no such run, or the hardware cannot compute it.
    """
    cfg = cli.plain_config(list(overrides))
    if cfg.init_from:
        cfg, _ = model_of_folder(cfg, 0)
    cfg = resolve(cfg, world_of(cfg, options, hardware))
    if cfg.precision.compute == "fp8" and hardware.device == "cuda" and "fp8" not in hardware.peak_tflops:
        raise ConfigError(f"precision.compute=fp8: hardware={hardware.name} has no fp8 matmuls: compute in bf16")
    return cfg


def show(cfg: Config, options: Options, hardware: Hardware) -> None:
    """Plans the ranks, prints the tables and writes the JSON.

    Raises:
        ConfigError: a rank cannot be built, or the file cannot be written.
    """
    groups = [[options.rank]] if options.rank is not None else plan_alike(cfg)
    planned = []
    for number, ranks in enumerate(groups, 1):
        if sys.stderr.isatty():
            print(f"\rrank {ranks[0]}: {number} of {len(groups)} ", end="", file=sys.stderr, flush=True)
        planned.append(report.Planned(ranks, stages_at(cfg, ranks[0]), dry_run(cfg, ranks[0], hardware.device)))
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    planned = report.merged(planned)
    print(report.as_text(cfg, hardware, planned))
    if options.json:
        try:
            Path(options.json).write_text(report.as_json(cfg, hardware, planned) + "\n")
        except OSError as error:
            raise ConfigError(f"json={options.json}: cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    logging.getLogger("ndtrain").addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    sys.exit(main(sys.argv[1:]))
