"""Estimates the cost of a case before it runs: seconds from its shapes alone, and bytes on the device.

The seconds are for an H100 or H200 whose compiled code is in the cache. The rates are pessimistic guesses until a run
has measured them.
"""

from lab.gpu.suite import Case, Suite, config_of
from ndtrain.config import Config, load_config, resolve
from ndtrain.model.flops import flops_per_token, hardware_flops_per_token, parameter_count
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.predict import Predictor, plan_step

GIB = 2**30
PEAK = 989e12  # dense bf16 FLOP/s
SHARE = {True: 0.5, False: 0.35}  # of the peak that a step reaches, compiled or not
START_S, COMPILE_S, PROFILE_S = 12, 8, 6  # process and device; loading cached graphs; the profiler and its events
BUILD_S, UPDATE_S, HOST_UPDATE_S = 4e-10, 1e-11, 1.2e-9  # per parameter: draw it, update it on the device, on the host
PROFILED = 1  # profiled steps of a profile case; each comes after a step that is not profiled
LONGEST_S = {"none": 30, "selective": 35, "budget": 40, "full": 150}  # few of its lengths are known in advance


def seconds(case: Case, suite: Suite) -> float:
    """Estimate the seconds that a case takes, including its process."""
    cfg = config_of(case)
    n = parameter_count(cfg.model)
    if case.kind == "longest" and case.shape != "tiny":
        return LONGEST_S[cfg.recompute.name]
    once = COMPILE_S * bool(cfg.train.compile) + PROFILE_S * (case.kind == "profile") + BUILD_S * n
    return START_S + len(case.implementations) * (once + steps(case, suite) * step_seconds(cfg))


def steps(case: Case, suite: Suite) -> int:
    """Return the number of steps that each implementation runs."""
    if case.kind in ("losses", "parity"):
        return case.steps
    measured = {"syncs": 1 + suite.steps, "profile": 1 + 2 * PROFILED}
    return 1 + suite.warmup + measured.get(case.kind, (case.rounds or suite.rounds) * suite.steps)


def step_seconds(cfg: Config) -> float:
    """Estimate the seconds of one step: matmuls and attention at their share of the peak, and the update."""
    m, t = cfg.model, cfg.train
    # recompute: full and budget count as the whole forward again, selective as nothing
    again = {"full": [frozenset()], "budget": [frozenset()]}.get(cfg.recompute.name, [])
    flops = hardware_flops_per_token(m, t.seq_len, again) if again else flops_per_token(m, t.seq_len)
    rate = HOST_UPDATE_S if cfg.optim.offload else UPDATE_S
    return t.global_batch * t.seq_len * flops / (PEAK * SHARE[bool(t.compile)]) + rate * parameter_count(m)


# -------------------------------------------------------------------------------------------------------------- memory


def peak_bytes(cfg: Config) -> int:
    """Return the bytes that the planner predicts for a step on an H100 or H200."""
    return Predictor(load_hardware("h100")).memory(plan_step(cfg, "cuda"))


def layers_that_fit(memory: int, overrides: tuple[str, ...], grain: int = 8) -> int:
    """Return the number of 8B's layers that train on 8,192 tokens without recompute: all if they fit, else a multiple
    of `grain`.

    Args:
        memory: bytes of the device.
        overrides: the precision and sharding of the state.
    """
    batch = ("train.seq_len=8192", "train.micro_batch=1", "train.global_batch=1")
    given = ["model=llama3_8b", "precision.compute=bf16", *batch, *overrides]
    cfg = resolve(load_config(given), 1)
    layers = cfg.model.num_hidden_layers
    while layers > grain and peak_bytes(cfg) > memory:
        layers -= grain
        cfg = resolve(load_config([*given, f"model.num_hidden_layers={layers}"]), 1)
    return layers
