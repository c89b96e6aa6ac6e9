"""`bench peers axis=cp`: attention over a sequence that is sharded over ranks, forward and backward. It compares ours
with PyTorch's ring attention, in alternating rounds.

PyTorch's `context_parallel` has no CPU backend. The bench calls its two ring templates with the CPU's flash kernels,
without the dispatch and autograd overhead of real use. Both of PyTorch's ways to pass the keys around the ring are
peers.

Shape legend: B batch, T local time, N query heads, K key/value heads, D head_dim.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as templates
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _create_default_load_balancer

from lab.peers.common import TOLERANCE, CommonOptions, compare, profiles, show_ratios
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.measure.rounds import BlockTimer, ratio, run_rounds
from ndtrain.mesh.collectives import Pending
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.scores import Scores
from ndtrain.parallel.build import DTYPES
from ndtrain.parallel.cp import Links, cp_core

LENGTHS = (2048, 8192)
PEERS = ("torch_allgather", "torch_alltoall")
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Results = tuple[Tensor, ...]  # out, dq, dk, dv, each [B, T, heads, D]
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Options(CommonOptions):
    """Options of `bench peers axis=cp`, in addition to the common ones."""

    seq_len: int = option("tokens of the whole sequence; default: 2048, then 8192", 0)
    heads: int = option("query heads", 8)
    kv_heads: int = option("key and value heads", 8)
    head_dim: int = option("size of a head", 64)
    ulysses: int = option("ranks of a Ulysses group of ndtrain; the ring has ranks / ulysses ranks", 1)
    balance: Literal["zigzag", "striped", "none"] = option("how ndtrain distributes tokens over ranks", "zigzag")
    exposed: bool = option("also measure ndtrain without communication", True)
    link_mb_s: int = option(
        "measure only ndtrain, over a simulated link of this many MB/s. Transfers follow one another, and waiting "
        "uses no CPU. With few cores, this shows how much communication is hidden if nothing competes with it",
        0,
    )
    warmup: int = option("untimed steps before the timed ones", 1)
    steps: int = option("steps per block", 1)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.seq_len,) if self.seq_len else LENGTHS

    @property
    def peers(self) -> tuple[str, ...]:
        return () if self.link_mb_s else PEERS

    def sharding(self, length: int) -> SequenceSharding:
        return SequenceSharding(length, self.world // self.ulysses, self.ulysses, self.balance)

    def check(self) -> None:
        super().check()
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.world % self.ulysses or self.heads % self.ulysses:
            raise ConfigError(f"ulysses={self.ulysses} must divide ranks={self.world} and heads={self.heads}")
        if self.kv_heads % self.ulysses and self.ulysses % self.kv_heads:
            raise ConfigError(f"one of ulysses={self.ulysses} and kv_heads={self.kv_heads} must divide the other")
        if self.link_mb_s and not self.exposed:
            raise ConfigError("link_mb_s measures exposed communication: remove exposed=false")
        for length in self.lengths:
            if length % (2 * self.world):
                raise ConfigError(f"seq_len={length} must be a multiple of 2 x ranks={self.world}")
            try:
                self.sharding(length)
            except ValueError as error:
                raise ConfigError(f"seq_len={length}: {error}") from error


def run(options: Options) -> None:
    """Run the comparison; see `common.compare`."""
    compare(options, options.lengths, measure, _show)


# ---------------------------------------------------------------------------------------------------------- the links


class MeteredLinks(Links):
    """Counts the bytes received, and the seconds that the calling thread spends on communication.

    Args:
        bytes_per_s: speed of the simulated link. Transfers pass one after another.
    """

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup, index: int, bytes_per_s: float = math.inf):
        super().__init__(sharding, group, index)
        self.bytes_per_s, self._free_at, self._member = bytes_per_s, 0.0, index % sharding.ulysses
        self.seconds, self.bytes = 0.0, 0

    def shift(self, send: Tensor, receive: Tensor) -> Pending:
        return self._metered(lambda: super(MeteredLinks, self).shift(send, receive), receive.nbytes)

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending:
        begin = lambda: super(MeteredLinks, self).exchange(sends, receives)
        return self._metered(begin, sum(x.nbytes for u, x in enumerate(receives) if u != self._member))

    def reset(self) -> tuple[float, int]:
        """Return (seconds, bytes) since the last reset, and reset both."""
        spent, self.seconds, self.bytes = (self.seconds, self.bytes), 0.0, 0
        return spent

    def _metered(self, begin: Callable[[], Pending], n_bytes: int) -> Pending:
        began = time.perf_counter()
        self._free_at = arrival = max(began, self._free_at) + n_bytes / self.bytes_per_s
        work = begin()
        self.bytes += n_bytes
        self.seconds += time.perf_counter() - began
        return Pending((), lambda: self._wait(work, arrival))

    def _wait(self, work: Pending, arrival: float) -> None:
        began = time.perf_counter()
        work.wait()
        time.sleep(max(0.0, arrival - time.perf_counter()))
        self.seconds += time.perf_counter() - began


class SilentLinks(Links):
    """Sends nothing. The buffers keep their old contents, which take the same time to compute with."""

    def shift(self, send: Tensor, receive: Tensor) -> Pending:
        return Pending(())

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending:
        return Pending(())


# ------------------------------------------------------------------------------------------------ the implementations


def whole_inputs(options: Options, length: int) -> Results:
    """Return q, k, v and the gradient of the output for the whole sequence, the same on every rank."""
    draw = torch.Generator().manual_seed(length)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shapes = [(1, length, h, options.head_dim) for h in heads]
    return tuple(torch.randn(s, generator=draw).to(DTYPES[options.precision]) for s in shapes)


def differentiated(core: Callable[..., Tensor], inputs: Results) -> Callable[[], Results]:
    """Return a step that runs an attention core forward and backward on these inputs."""
    q, k, v, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ctx = SimpleNamespace(scores=Scores())

    def step() -> Results:
        out = core(*leaves, ctx)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    return step


def templated(inputs: Results, group: dist.ProcessGroup, method: str) -> Callable[[], Results]:
    """Return a step of PyTorch's ring. It takes heads before time, so its inputs are views, as in real use."""
    q, k, v, grad = (x.transpose(1, 2) for x in inputs)

    def step() -> Results:
        templates.set_rotate_method(method)
        out, lse, *_ = templates._templated_ring_attention(group, 2, FLASH, q, k, v, is_causal=True, dropout_p=0.0)
        gradients = templates._templated_ring_attention_backward(
            group, 2, FLASH_BACKWARD, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return tuple(x.transpose(1, 2) for x in (out, *gradients[:3]))

    return step


def peers_index(length: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens that PyTorch's own load balancer assigns to this rank, int64 [T]."""
    balancer = _create_default_load_balancer(length, group.size(), "cpu")
    return balancer._generate_indices()[0].chunk(group.size())[group.rank()]


# ------------------------------------------------------------------------------------------------------------- a rank


def measure(rank: int, options: Options, length: int) -> dict[str, Any]:
    """Compare every implementation with one process, then time it. Runs on each rank.

    Raises:
        RuntimeError: an output or a gradient differs from one process's.
    """
    torch.set_flush_denormal(True)  # denormals that the silent links leave in buffers must not slow the computation
    group, sharding = dist.group.WORLD, options.sharding(length)
    inputs = whole_inputs(options, length)
    expected = differentiated(local_core, inputs)()
    local = lambda whole, index: tuple(x[:, index].contiguous() for x in whole)
    own_index, peer_index = torch.from_numpy(sharding.index(rank)), peers_index(length, group)
    own = local(inputs, own_index)
    links = MeteredLinks(sharding, group, rank, options.link_mb_s * 1e6 or math.inf)
    steps = {"ours": differentiated(cp_core(sharding, group, rank, links), own)}
    for name in options.peers:
        steps[name] = templated(local(inputs, peer_index), group, name.removeprefix("torch_"))
    differences = {}
    for name, step in steps.items():
        index = own_index if name == "ours" else peer_index
        differences[name] = require_agreement(name, step(), local(expected, index), TOLERANCE[options.precision])
    if options.exposed:  # next to ours in each round, because it is subtracted from ours
        silent = differentiated(cp_core(sharding, group, rank, SilentLinks(sharding, group, rank)), own)
        steps = {"ours": steps.pop("ours"), "silent": silent, **steps}
    del inputs, expected
    return _timed(options, steps, links) | {"differences": differences}


def require_agreement(name: str, results: Results, expected: Results, bound: float) -> dict[str, float]:
    """Return the error of each result, relative to the largest expected element.

    Raises:
        RuntimeError: an error exceeds `bound`.
    """
    differences = {}
    for what, a, b in zip(NAMES, results, expected, strict=True):
        differences[what] = ((a - b).abs().max() / b.abs().max()).item()
        if not differences[what] <= bound:
            raise RuntimeError(f"not the same work: {what} of {name} is {differences[what]:.1e} from one process's")
    return differences


def _timed(options: Options, steps: dict[str, Callable[[], Results]], links: MeteredLinks) -> dict[str, Any]:
    own_ms: dict[str, list[float]] = {name: [] for name in steps}  # of every step on this rank
    meter: list[tuple[float, int]] = []

    def step(name: str) -> None:
        links.reset()
        began = time.perf_counter()
        steps[name]()
        own_ms[name].append((time.perf_counter() - began) * 1e3)
        if name == "ours":
            meter.append(links.reset())

    timers = {name: BlockTimer(partial(step, name)) for name in steps}
    run_rounds(timers, options)
    result = {
        "sides": {name: {"ms_per_step": t.ms_per_step, "block_ms": t.block_ms} for name, t in timers.items()},
        "ratios": {name: ratio(timers[name], timers["ours"]) for name in options.peers},
    }
    if options.exposed:
        result["exposed"] = _exposed(options, own_ms, meter)
    if options.profile:
        result["profile"] = profiles(timers)
    return result


def _exposed(options: Options, own_ms: dict[str, list[float]], meter: list[tuple[float, int]]) -> dict[str, float]:
    """Return the cost of communication in ms per step, as means over the ranks.

    `spent` is the time in communication calls. `lost` is the extra time of a step, compared with the next step without
    communication. Both are medians. `best` values come from the fastest steps, which a busy machine disturbs least.
    """
    ours, silent = (own_ms[name][options.warmup :] for name in ("ours", "silent"))
    spent = [seconds * 1e3 for seconds, _ in meter[options.warmup :]]
    fastest = min(range(len(ours)), key=ours.__getitem__)
    costs = {
        "spent_ms": statistics.median(spent),
        "lost_ms": statistics.median(a - b for a, b in zip(ours, silent, strict=True)),
        "best_spent_ms": spent[fastest],
        "best_lost_ms": ours[fastest] - min(silent),
        "received_mb": meter[-1][1] / 1e6,
    }
    sums = torch.tensor(list(costs.values()), dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(costs, (sums / options.world).tolist(), strict=True))


# -------------------------------------------------------------------------------------------------------------- output


def _show(options: Options, length: int, result: dict[str, Any]) -> None:
    print(
        f"\nattention over {length} tokens: ranks={options.world} {options.precision}"
        f" heads={options.heads} kv_heads={options.kv_heads} head_dim={options.head_dim}"
        f" ulysses={options.ulysses} balance={options.balance}"
        + f" link_mb_s={options.link_mb_s}" * bool(options.link_mb_s)
        + f"; {options.rounds} rounds of {options.steps} steps"
    )
    for name, own in result["sides"].items():
        far = result["differences"].get(name)
        agrees = f"   within {max(far.values()):.0e} of one process" if far else "   nothing sent"
        print(f"  {name:16} {own['ms_per_step']:9.2f} ms forward and backward{agrees}")
    show_ratios(result)
    if "exposed" in result:
        e = result["exposed"]
        print(
            f"  exposed communication: {e['spent_ms']:.2f} ms spent sending and waiting, {e['lost_ms']:.2f} ms lost"
            f" against none, of best steps {e['best_spent_ms']:.2f} and {e['best_lost_ms']:.2f},"
            f" for {e['received_mb']:.1f} MB received (means over ranks)"
        )
