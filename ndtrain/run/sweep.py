"""Jobs that Hydra runs: `--multirun`, `--cfg` and its other flags. Errors are one line, as for a single run."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ndtrain.config import Config, ConfigError, resolve, world_from_env
from ndtrain.config.composition import compose_checked, register_schema, search_path
from ndtrain.config.composition_errors import one_line, wrong_configuration
from ndtrain.config.keys import conf_dir
from ndtrain.config.overrides import sweep_jobs
from ndtrain.config.typed import to_config
from ndtrain.device.environment import variable_set
from ndtrain.run.exit_status import CODES
from ndtrain.run.sweep_jobs import as_job

_FULL = "HYDRA_FULL_ERROR"  # if 1, Hydra raises its errors instead of printing them in many lines


def run_with_hydra(
    train: Callable[[Config], int],
    flags: list[str],
    overrides: list[str],
    search: Sequence[str],
    report: Callable[[ConfigError], None],
) -> int:
    """Pass the command to Hydra, and run `train` for each of its jobs.

    Args:
        flags: Hydra's own flags.
        overrides: the overrides as returned by `check_overrides`.
        search: the folders of `--config-dir`.
        report: prints the error of a job.

    Returns:
        The largest exit status of the jobs.

    Raises:
        ConfigError: the configuration of a job is wrong. In this case no job has started.
    """
    import hydra

    if {"--multirun", "-m"} & set(flags):
        check_jobs(overrides, search)
    register_schema()
    codes: list[int] = []
    failed: list[BaseException] = []

    def task(cfg: Any) -> None:
        if CODES["stopped"] in codes:  # a stop request applies to the whole sweep
            return
        try:
            codes.append(train(as_job(to_config(cfg), overrides)))
        except ConfigError as error:  # caught here, because Hydra would print a traceback
            report(error)
            codes.append(2)
        except BaseException as error:
            failed.append(error)
            raise

    sys.argv[1:] = [*flags, *overrides, *search_path(search)]
    try:
        with variable_set(_FULL, "1"):  # Hydra then raises its errors, instead of printing them
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    except Exception as error:
        if failed or not wrong_configuration(error, overrides):
            raise
        raise ConfigError(one_line(error, search, overrides)) from error
    return max(codes, default=0)


def check_jobs(overrides: list[str], search: Sequence[str]) -> None:
    """Compose and check every job of a sweep, so that a wrong value in any job ends the sweep before the first job.

    Raises:
        ConfigError: a job is wrong; the message names it.
    """
    jobs = sweep_jobs(overrides)
    for number, job in enumerate(jobs):
        try:
            cfg = compose_checked([*job, f"hydra.job.num={number}", f"hydra.job.id={number}"], search)
            if not cfg.init_from:  # with init_from, the model is known only later
                resolve(cfg, world_from_env()[2])
        except ConfigError as error:
            own = " ".join(o for o in job if o not in overrides)
            which = f"job {number + 1} of {len(jobs)} ({own}), none has started: " if len(jobs) > 1 else ""
            raise ConfigError(f"{which}{error}") from error
