"""Checks that each rank runs alone: software, device, arithmetic."""

import hashlib
import json
import os
import platform
import socket
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ndtrain
from ndtrain.config import Config, world_from_env
from ndtrain.device.gpu import own_gpu
from ndtrain.device.measured_peak import cpu_model
from ndtrain.mesh.mesh import EP
from ndtrain.parallel.build import DTYPES
from ndtrain.preflight.rank_context import Findings, RankContext
from ndtrain.preflight.report import (
    Ranks,
    Row,
    Status,
    bytes_of,
    few,
    listed,
    odd_values,
    per_second,
    slow,
    usual_rate,
    worst,
)
from ndtrain.run.listeners import public_addresses

MATMUL_S = 0.3  # seconds for which matmuls are timed
SIZES = {"cpu": 256, "cuda": 8192}  # of a square matmul; on CPU it ends before another process takes the core
SLOW_MATMUL = (0.5, 0.8)  # shares of the usual rate: fail below the first, warn below the second
TAKEN = 0.1  # share of a GPU's memory that others may use without a warning
_FREE = ("OMP_NUM_THREADS",)  # may differ without an effect on the results

# ------------------------------------------------------------------------------------------------- software and device


def device_of(cfg: Config) -> torch.device:
    """Return this rank's device. If its GPU is missing, return the CPU; `device_facts` then reports the problem."""
    index = own_gpu(world_from_env()[1]) if cfg.hardware.device != "cpu" else None
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that must be the same on every rank."""
    values = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "ndtrain": f"{ndtrain.__version__} (sources {_sources()})",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
    }
    if device.type == "cuda":
        values |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return values


@cache
def _sources() -> str:
    """Return eight digits of a hash of the sources, to tell apart two checkouts of the same version."""
    digest, root = hashlib.sha256(), Path(ndtrain.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def device_facts(device: torch.device, wanted: str) -> Findings:
    """Return kind, name and memory of the device, and its problem if it has one.

    Args:
        wanted: `hardware.device`.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts = {"kind": "cuda", "name": torch.cuda.get_device_name(device), "memory": total, "free": free}
        sees_one = torch.cuda.device_count() == 1  # the rank's own GPU, or one it shares by mistake
        return facts | ({"uuid": str(torch.cuda.get_device_properties(device).uuid)} if sees_one else {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {"kind": "cpu", "name": f"{cpu_model()}, threads: {torch.get_num_threads()}", "memory": memory}
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" or gpus:
        facts["problem"] = f"no GPU left for it: {here} ranks on this host, {gpus} GPUs that torch can use"
    return facts


def _configuration(cfg: Config) -> str:
    """Return eight digits of the configuration's hash. Leaves out the data cache, which may differ by host."""
    plain = asdict(replace(cfg, data=replace(cfg.data, cache="")))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def probe_host(context: RankContext) -> Findings:
    return {
        "host": socket.gethostname(),
        "versions": versions(context.device) | {"configuration": _configuration(context.cfg)},
        "device": device_facts(context.device, context.cfg.hardware.device),
        "public": public_addresses() if context.spec.world_size > 1 else [],
    }


def check_hosts(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    ranks.hosts.update({r: f["host"] for r, f in by_rank.items()})
    rows = [Row("ranks", Status.OK, _where(ranks)), Row("mesh", Status.OK, _mesh(ranks))]
    devices = _devices({r: f["device"] for r, f in by_rank.items()}, ranks)
    return [*rows, _versions(by_rank, ranks), devices, *_addresses(by_rank, ranks)]


def _addresses(by_rank: dict[int, Findings], ranks: Ranks) -> list[Row]:
    """Return a warning if ranks listen on a public address."""
    public = {r: f"listens on the public address {', '.join(f['public'])}" for r, f in by_rank.items() if f["public"]}
    advice = (
        "close the ports listed in docs/launch.md to other networks, or choose another interface (NDTRAIN_INTERFACE)"
    )
    return [Row("addresses", Status.WARNING, advice, ranks.grouped(public))] if public else []


def _where(ranks: Ranks) -> str:
    """Return the hosts of the ranks as text: "8 on 2 hosts, node0: 0-3, node1: 4-7"."""
    by_host: dict[str, list[int]] = {}
    for rank, host in ranks.hosts.items():
        by_host.setdefault(host, []).append(rank)
    hosts = f"{len(by_host)} host{'s' * (len(by_host) > 1)}"
    return f"{len(ranks.hosts)} on {hosts}, " + listed([f"{host}: {_runs(of)}" for host, of in by_host.items()])


def _runs(numbers: list[int]) -> str:
    """Return numbers as text, with consecutive ones joined: "0-3, 8"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def _mesh(ranks: Ranks) -> str:
    """Return the mesh as text: "dp=2 (between hosts) tp=4 (within hosts)"."""
    spec = ranks.spec
    inside = lambda axis: all(ranks.same_host(g[0], r) for g in spec.groups(axis) for r in g)
    wide = [a for a in (*spec.order, EP) if spec.size(a) > 1]
    said = [f"{a}={spec.size(a)} ({'within hosts' if inside(a) else 'between hosts'})" for a in wide]
    return " ".join(said) or "one process"


def _versions(by_rank: dict[int, Findings], ranks: Ranks) -> Row:
    statuses, usual, notes = [], {}, []
    for key in by_rank[0]["versions"]:
        usual[key], odd = odd_values({r: str(f["versions"].get(key)) for r, f in by_rank.items()})
        statuses += [Status.WARNING if key in _FREE else Status.FAILED] * bool(odd)
        notes += ranks.grouped({r: f"{key} {value} instead of {usual[key]}" for r, value in odd.items()})
    figure = ", ".join(f"{key} {value}" for key, value in usual.items())
    return Row("versions", worst(statuses), figure, tuple(notes))


def _devices(by_rank: dict[int, Findings], ranks: Ranks) -> Row:
    """Check the devices. All must be of one kind, or no process group can be made."""
    wrong = {r: f["problem"] for r, f in by_rank.items() if "problem" in f}
    kind, odd_kinds = odd_values({r: f["kind"] for r, f in by_rank.items()})
    wrong |= {r: f"{odd} instead of {kind}" for r, odd in odd_kinds.items() if r not in wrong}
    wrong |= _shared_gpus(by_rank)
    name, odd_names = odd_values({r: f["name"] for r, f in by_rank.items()})
    other = {r: f"{odd} instead of {name}" for r, odd in odd_names.items() if r not in wrong}
    taken = {
        r: f"only {bytes_of(f['free'])} of {bytes_of(f['memory'])} of GPU memory are free"
        for r, f in by_rank.items()
        if "free" in f and f["free"] < (1 - TAKEN) * f["memory"]
    }
    memory = bytes_of(min(f["memory"] for f in by_rank.values())) + (" each" if kind == "cuda" else " per host")
    status = Status.FAILED if wrong else Status.WARNING if other or taken else Status.OK
    notes = (*ranks.grouped(wrong), *ranks.grouped(other), *ranks.grouped(taken))
    return Row("devices", status, f"{len(by_rank)} x {name}, {memory}", notes)


def _shared_gpus(by_rank: dict[int, Findings]) -> dict[int, str]:
    """Return a message for each rank that sees a single GPU which is also another rank's."""
    owners: dict[str, int] = {}
    first = {r: owners.setdefault(f["uuid"], r) for r, f in sorted(by_rank.items()) if "uuid" in f}
    return {r: f"uses the same GPU as rank {owner}" for r, owner in first.items() if owner != r}


# ---------------------------------------------------------------------------------------------------------- arithmetic


def operands(context: RankContext) -> tuple[Tensor, Tensor]:
    """Return two square matrices of 0, 1 and -1 in the compute precision, the same on every rank. Most elements are 0,
    so that their product is exact even in bf16."""
    n, dtype = SIZES[context.device.type], DTYPES[context.cfg.precision.compute]
    draw = torch.Generator().manual_seed(0)
    values = torch.tensor([1, -1, 0, 0, 0, 0, 0, 0], dtype=dtype, device=context.device)
    a, b = (torch.randint(8, (n, n), generator=draw, dtype=torch.int32).to(context.device) for _ in range(2))
    return values[a], values[b]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def probe_matmul(context: RankContext) -> Findings:
    """Return the rate of the fastest matmul, and check that the product is right.

    Freivalds' check (1977): (A B) x must equal A (B x) for a random x. All numbers are integers, so both are equal to
    the last bit.
    """
    a, b = operands(context)
    shortest, until = float("inf"), time.perf_counter() + MATMUL_S
    matmul(a, b)
    context.synchronize()
    while time.perf_counter() < until or shortest == float("inf"):
        began = time.perf_counter()
        product = matmul(a, b)
        context.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(1, 1000, (len(a), 1), generator=draw).double().to(context.device)
    finite = bool(product.isfinite().all())
    right = finite and torch.equal(product.double() @ x, a.double() @ (b.double() @ x))
    return {"rate": 2 * len(a) ** 3 / shortest, "finite": finite, "right": right}


def check_matmul(by_rank: dict[int, Findings], ranks: Ranks, cfg: Config) -> list[Row]:
    rates = {r: f["rate"] for r, f in by_rank.items()}
    usual = usual_rate(rates.values())
    status, odd = slow(rates, usual, *SLOW_MATMUL)
    wrong = {r: "gives NaN or infinity" for r, f in by_rank.items() if not f["finite"]}
    wrong |= {r: "gives a wrong product" for r, f in by_rank.items() if f["finite"] and not f["right"]}
    late = few([f"slow, {per_second(rates[r], 'FLOP')}: {ranks.one(r)}" for r in odd])
    figure = f"{per_second(min(rates.values()), 'FLOP')} to {per_second(max(rates.values()), 'FLOP')}"
    status = Status.FAILED if wrong else status
    return [Row("matmul", status, f"{figure}, {cfg.precision.compute}", (*ranks.grouped(wrong), *late))]
