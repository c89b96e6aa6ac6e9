"""The command line of a run: overrides, Hydra's own flags, and configuration errors in one line."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ndtrain.config import (
    Config,
    ConfigError,
    check_overrides,
    conf_dir,
    load_config,
    register_schema,
    to_config,
    world_from_env,
)
from ndtrain.runtime.exit_status import CODES
from ndtrain.runtime.stop_signals import REPEAT_S
from ndtrain.runtime.sweep_jobs import as_job

log = logging.getLogger("ndtrain")

Train = Callable[[Config], int]

# Hydra's flags -> whether a value follows
_FLAGS = {
    "--cfg": True, "-c": True, "--package": True, "-p": True, "--info": True, "-i": True, "--multirun": False,
    "-m": False, "--run": False, "-r": False, "--resolve": False, "--help": False, "-h": False, "--hydra-help": False,
    "--version": False,
}  # fmt: skip


def main(train: Train, args: list[str] | None = None) -> int:
    """Runs `train` with the configuration that `args` describe. Returns the exit status.

    With one of Hydra's own flags (`--cfg job`, `--multirun`, `--help`) Hydra runs it; otherwise the configuration is
    composed here. A configuration error is printed as one line and gives status 2.

    Args:
        args: None: those of the process.
    """
    args = sys.argv[1:] if args is None else args
    try:
        if not args:
            raise ConfigError("nothing to train: name a recipe, e.g. recipe=llama_small; --help lists more")
        overrides, search, flags = _split(args)
        if flags:
            overrides = check_overrides(overrides, search)
            folders = [f"--config-dir={s}" for s in search[:1]]
            return _hydra_main(train, [*flags, *folders, *overrides], overrides)
        return train(load_config(overrides, search))
    except ConfigError as error:
        _report_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the first step: nothing was saved", file=sys.stderr, flush=True)
        return 130


def plain_config(args: list[str]) -> Config:
    """The configuration of a run with these arguments.

    Raises:
        ConfigError: an argument is wrong, or it is one of Hydra's own flags.
    """
    overrides, search, flags = _split(args)
    if flags:
        raise ConfigError(f"{flags[0]}: not here; only overrides and --config-dir")
    return load_config(overrides, search)


def _report_error(error: ConfigError) -> None:
    """Prints the error, in general once per host. The ranks of a host mostly have the same error, and torchrun ends all
    of them when the first one exits. Local rank 0 prints at once; the others wait, and print if they still run."""
    rank, local_rank, _ = world_from_env()
    log.error(str(error))
    if local_rank > 0:
        time.sleep(REPEAT_S * 3)
    print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr, flush=True)


def _split(args: list[str]) -> tuple[list[str], list[str], list[str]]:
    """(overrides, folders named by --config-dir, Hydra's other flags with their values).

    Raises:
        ConfigError: a flag is unknown or lacks its value, or a folder does not exist.
    """
    overrides, search, flags = [], [], []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if name in ("--config-dir", "-cd"):
            search.append(value if equals else _value(arg, rest))
            if not Path(search[-1]).is_dir():
                raise ConfigError(f"{name}={search[-1]}: no such folder")
        elif name in _FLAGS:
            flags += [arg, _value(arg, rest)] if _FLAGS[name] and not equals else [arg]
        elif arg.startswith("-"):
            raise ConfigError(
                f"{arg}: no such flag; known: --config-dir, {', '.join(f for f in _FLAGS if f[:2] == '--')}"
            )
        else:
            overrides.append(arg)
    return overrides, search, flags


def _value(flag: str, rest: Iterator[str]) -> str:
    try:
        return next(rest)
    except StopIteration:
        raise ConfigError(f"{flag}: a value must follow") from None


def _hydra_main(train: Train, args: list[str], overrides: list[str]) -> int:
    import hydra

    register_schema()
    codes: list[int] = []

    def task(cfg: Any) -> None:
        if CODES["stopped"] in codes:  # a stop is meant for the whole sweep
            return
        try:
            codes.append(train(as_job(to_config(cfg), overrides)))
        except ConfigError as error:  # caught here, since Hydra would print a traceback
            _report_error(error)
            codes.append(2)

    sys.argv[1:] = args
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    return max(codes, default=0)


def run_and_exit(train: Train) -> NoReturn:
    """Runs `main` and exits with its status. With several ranks it skips Python's teardown: gloo's threads abort in it
    in about every second run, and after an error it waits for peers that never answer."""
    if world_from_env()[2] == 1:
        sys.exit(main(train))
    code: Any = 1
    try:
        code = main(train)
    except SystemExit as request:
        code = request.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
