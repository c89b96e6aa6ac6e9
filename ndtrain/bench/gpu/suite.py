"""What `bench gpu` measures and what it aims for, as tables: every case of a suite is one row here.

Bytes a parameter on one rank (see parallel/fsdp.py; gradients are fp32 and stay): the bf16 copy 2 (`mesh.zero=2` keeps
it, 3 casts block by block), gradients 4, master 4, moments 8, or 4 with `optim.state_dtype=bf16`; `optim.offload` moves
master and moments to the host. Activations without recompute, per token and layer: inputs of the matmuls, q, k, v and
attention's output, about 6.5 E + 3 F values of bf16. In GiB, at the tokens of a microbatch:

| shape       | parameters | state zero=2 | state zero=3, bf16 moments | state offloaded | activations, none    |
|-------------|------------|--------------|----------------------------|-----------------|----------------------|
| 1b          |     1.24 B |           21 |                         14 |               7 | 37 (32,768 tokens)   |
| 8b          |     8.03 B |          135 |                         90 |              45 | 34 (8,192 tokens)    |
| 8b8         |     2.80 B |           47 |                         31 |              16 | 8.5 (8,192 tokens)   |

So 8B fits an H200 (139 GiB) with bf16 moments and zero=3, even without recompute (124 GiB), and an H100 (78 GiB) only
with master and moments on the host (60 GiB of it with bf16 moments). Plain PyTorch needs 120 GiB of state for 8B, so
that no peer fits beside ours: they alternate at 1B and at 8B's widths with 8 of its layers (`8b8`, 47 + 42 GiB of
state), and at 8B each runs alone.
"""

from dataclasses import dataclass
from typing import Literal

from ndtrain.config import Config, load_config, resolve

Kind = Literal["timed", "losses", "longest", "syncs"]


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Attributes:
        shape: a name in `SHAPES`. words: what sets the case apart; with the shape its name.
        overrides: of the configuration, beside the shape's and `BASE`.
        implementations: "ours", and what it is compared with in alternating rounds; or one peer alone.
        kind: timed: steps in alternating rounds; losses: those of `steps` steps; longest: the sequence that still fits;
            syncs: what makes the host wait.
        steps: with losses, how many; start, most, grain: with longest, the tokens to begin with, to end at, and how
            fine to search.
    """

    shape: str
    words: str
    overrides: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ("ours",)
    kind: Kind = "timed"
    steps: int = 200
    start: int = 8192
    most: int = 2**20
    grain: int = 4096

    @property
    def name(self) -> str:
        return f"{self.shape} {self.words}"


@dataclass(frozen=True)
class Suite:
    """Cases for one kind of device, and how long each implementation of a timed one is measured.

    Attributes:
        rounds: timed blocks; steps: steps a block; warmup: steps before, untimed.
    """

    device: str
    cases: tuple[Case, ...]
    rounds: int = 6
    steps: int = 3
    warmup: int = 4


SHAPES = {
    "1b": ("model=llama3_2_1b",),
    "8b": ("model=llama3_8b",),
    "8b8": ("model=llama3_8b", "model.num_hidden_layers=8"),
    "tiny": (
        "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "model.vocab_size=256",
        "model.num_attention_heads=4", "model.num_key_value_heads=2", "train.loss_chunk=64",
    ),
}  # fmt: skip
BASE = ("precision.compute=bf16", "optim.schedule=constant", "train.loss_chunk=2048", "mesh.zero=2")
COMPILED, EAGER = "train.compile=true", "train.compile=false"
NARROW = ("mesh.zero=3", "optim.state_dtype=bf16")
OFFLOAD = ("optim.state_dtype=bf16", "optim.offload=true")
FP8 = "precision.compute=fp8"


def _tokens(seq_len: int, micro_batch: int, microbatches: int = 1) -> tuple[str, ...]:
    return (
        f"train.seq_len={seq_len}", f"train.micro_batch={micro_batch}",
        f"train.global_batch={micro_batch * microbatches}",
    )  # fmt: skip


def _steps(shape: str, tokens: int, state: tuple[str, ...], microbatches: int, budget: str) -> list[Case]:
    """The timed cases of a shape: lengths, compile, recompute. `tokens` is those of a microbatch without recompute."""
    at = {length: _tokens(length, max(1, tokens // length), microbatches) for length in (4096, 8192)}
    make = lambda words, length, *more: Case(shape, words, (*at[length], *state, *more))
    return [
        make("8192", 8192, COMPILED),
        make("8192 eager", 8192, EAGER),
        make("4096", 4096, COMPILED),
        make("4096 eager", 4096, EAGER),
        make("8192 full", 8192, COMPILED, "recompute=full"),
        make("8192 selective", 8192, COMPILED, "recompute=selective"),
        make("8192 selective eager", 8192, EAGER, "recompute=selective"),
        make("8192 budget", 8192, COMPILED, "recompute=budget", f"recompute.budget={budget}"),
        make("8192 fp8", 8192, COMPILED, FP8),
        make("8192 fp8 full", 8192, COMPILED, FP8, "recompute=full"),
    ]


def _attention(shape: str, micro_batch: int, *more: str) -> list[Case]:
    """Each backend. `math` keeps every layer's scores: 2 T^2 bytes a head, a few times, so a microbatch is small."""
    tokens = (*_tokens(4096, micro_batch), COMPILED, *more)
    kinds = ("auto", "flash", "cudnn", "efficient", "math")
    return [Case(shape, f"4096 attention {kind}", (*tokens, f"hardware.attention={kind}")) for kind in kinds]


def _versus(shape: str, micro_batch: int, *more: str) -> list[Case]:
    """Ours and a peer in alternating rounds, both with the recompute named."""
    tokens = (*_tokens(8192, micro_batch), COMPILED, *more)
    again = "recompute=selective"
    pairs = (("", "native", ()), ("selective ", "native", (again,)), ("", "transformers", ()))
    return [Case(shape, f"8192 {mode}against {peer}", (*tokens, *key), ("ours", peer)) for mode, peer, key in pairs]


def _losses(shape: str, *more: str) -> list[Case]:
    tokens = (*_tokens(8192, 1), COMPILED, "optim.warmup=20", *more)
    return [
        Case(shape, "8192 losses bf16", tokens, kind="losses"),
        Case(shape, "8192 losses fp8", (*tokens, FP8), kind="losses"),
    ]


def _longest(state: tuple[str, ...], budget: str) -> list[Case]:
    modes = {"none": (), "selective": (), "budget": (f"recompute.budget={budget}",), "full": ()}
    return [
        Case("8b", f"longest {mode}", (*_tokens(8192, 1), *state, EAGER, f"recompute={mode}", *more), kind="longest")
        for mode, more in modes.items()
    ]


_SYNCS = Case("1b", "4096 host waits", (*_tokens(4096, 1), COMPILED), kind="syncs")
_H200 = (
    *_steps("1b", 32768, (), 1, "20GiB"),
    *_steps("8b", 8192, NARROW, 4, "20GiB"),
    *_versus("1b", 2),
    *_versus("8b8", 1),
    Case("8b", "8192 full, native", (*_tokens(8192, 1, 4), COMPILED, "mesh.zero=3", "recompute=full"), ("native",)),
    *_attention("1b", 1),
    *_attention("8b8", 1),
    _SYNCS,
    Case("8b", "8192 full offloaded", (*_tokens(8192, 1, 8), *OFFLOAD, COMPILED, "recompute=full")),
    *_losses("8b", *NARROW),
    *_longest(NARROW, "40GiB"),
)
_H100 = (
    *_steps("1b", 16384, (), 1, "12GiB"),
    *_steps("8b8", 8192, (), 2, "5GiB"),
    *_versus("1b", 1),
    *_attention("1b", 1),
    _SYNCS,
    Case("8b", "8192 full offloaded", (*_tokens(8192, 1, 8), *OFFLOAD, COMPILED, "recompute=full")),
    *_losses("8b8"),
    *_longest(OFFLOAD, "20GiB"),
)
_SMALL = (*_tokens(64, 2), "train.loss_chunk=64")
_SMOKE = (
    Case("tiny", "eager", _SMALL),
    Case("tiny", "full", (*_SMALL, "recompute=full")),
    Case("tiny", "budget", (*_SMALL, "recompute=budget", "recompute.budget=2MiB")),
    Case("tiny", "compiled", (*_SMALL, COMPILED, "model.num_hidden_layers=1")),
    Case("tiny", "selective", (*_SMALL, COMPILED, "model.num_hidden_layers=1", "recompute=selective")),
    Case("tiny", "fp8", (*_SMALL, COMPILED, "model.num_hidden_layers=1", FP8)),
    Case("tiny", "bf16 moments", (*_SMALL, *NARROW)),
    Case("tiny", "offloaded", (*_SMALL, *OFFLOAD)),
    Case("tiny", "attention auto", (*_SMALL, "hardware.attention=auto")),
    Case("tiny", "against native", (*_SMALL, "recompute=selective"), ("ours", "native")),
    Case("tiny", "against transformers", _SMALL, ("ours", "transformers")),
    Case("tiny", "full, native", (*_SMALL, "recompute=full"), ("native",)),
    Case("tiny", "host waits", _SMALL, kind="syncs"),
    Case("tiny", "losses bf16", (*_SMALL, "optim.lr=3e-3"), kind="losses", steps=40),
    Case("tiny", "losses fp8", (*_SMALL, "optim.lr=3e-3", FP8), kind="losses", steps=40),
    Case("tiny", "longest full", (*_SMALL, "recompute=full"), kind="longest", start=64, most=320, grain=64),
)
SUITES = {
    "h200": Suite("NVIDIA H200 (139 GiB)", _H200),
    "h100": Suite("NVIDIA H100 (78 GiB)", _H100),
    "smoke": Suite("any device", _SMOKE, rounds=2, steps=1, warmup=1),
}


def config_of(case: Case) -> Config:
    """What the case's implementations train by.

    Raises:
        ConfigError: naming the key.
    """
    return resolve(load_config([*SHAPES[case.shape], *BASE, *case.overrides]), 1)
