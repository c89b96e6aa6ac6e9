"""The cases of `bench gpu` as a table: each case of a suite is one row here. The most decisive cases come first.

Bytes per parameter on one rank (see parallel/fsdp.py):
- the bf16 copy: 2 (`mesh.zero=2` keeps it, 3 casts block by block)
- gradients: 4 (fp32, never freed)
- master weights: 4
- moments: 8, or 4 with `optim.state_dtype=bf16`

`optim.offload` moves master weights and moments to the host. The last column is the rest of a compiled step without
recompute, as the planner predicts it. In GiB, with the tokens of a microbatch in parentheses:

| shape       | parameters | state zero=2 | state zero=3, bf16 moments | state offloaded | step, zero=2         |
|-------------|------------|--------------|----------------------------|-----------------|----------------------|
| 1b          |     1.24 B |           21 |                         14 |               7 | 38 (32,768 tokens)   |
| 8b          |     8.03 B |          135 |                         90 |              45 | 35 (8,192 tokens)    |
| 8b16        |     4.54 B |           76 |                         51 |              25 | 18 (8,192 tokens)    |
| 8b8         |     2.80 B |           47 |                         31 |              16 | 9.4 (8,192 tokens)   |
| 8b4         |     1.92 B |           32 |                         21 |              11 | 5.2 (8,192 tokens)   |

8B fits an H200 (139 GiB) with bf16 moments and zero=3, even without recompute (130 GiB). It fits an H100 (78 GiB) only
with master weights and moments on the host (60 GiB of it with bf16 moments). The copies to the host are no measure of
the GPU. An H100 therefore measures `8b16` instead: 8B's widths with the most layers that fit
(`estimate.layers_that_fit`), 16 of 32.

Plain PyTorch needs 120 GiB of state for 8B, so no peer fits next to ours. At 8B each runs alone. They alternate at 1B
and at 8B's widths with 8 of its layers (`8b8`, 47 + 42 GiB of state). On an H100 they alternate with 4 layers (`8b4`,
32 + 29 GiB).
"""

from dataclasses import dataclass
from typing import Literal

from ndtrain.config import Config, load_config, resolve

Kind = Literal["timed", "losses", "longest", "syncs", "parity", "profile"]


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Attributes:
        shape: a name in `SHAPES`.
        words: what distinguishes the case; its name is the shape and these words.
        overrides: of the configuration, in addition to the shape's and `BASE`.
        implementations: "ours" and the peer it is compared with in alternating rounds, or one implementation alone.
        kind: timed: steps in alternating rounds; losses: the losses of `steps` steps; longest: the longest sequence
            that fits; syncs: the calls that make the host wait; parity: the same steps on the device and on the CPU;
            profile: where the time of a step goes.
        steps: number of steps, for losses and parity.
        start: first length to try, in tokens, for longest.
        most: largest length to try, for longest.
        grain: resolution of the search in tokens, for longest.
        rounds: of a timed case; 0: the suite's number.
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
    rounds: int = 0

    @property
    def name(self) -> str:
        return f"{self.shape} {self.words}"


@dataclass(frozen=True)
class Suite:
    """The cases for one kind of device, and how long each implementation of a timed case is measured.

    Attributes:
        memory: GiB of the device.
        large: the shape that replaces 8B on it.
        paired: the shape at which ours and its peers alternate.
        rounds: timed blocks.
        steps: steps per block.
        warmup: untimed steps before.
    """

    device: str
    cases: tuple[Case, ...]
    memory: int = 0
    large: str = "8b"
    paired: str = "8b8"
    rounds: int = 3
    steps: int = 2
    warmup: int = 1


SHAPES = {
    "1b": ("model=llama3_2_1b",),
    "8b": ("model=llama3_8b",),
    "8b16": ("model=llama3_8b", "model.num_hidden_layers=16"),
    "8b8": ("model=llama3_8b", "model.num_hidden_layers=8"),
    "8b4": ("model=llama3_8b", "model.num_hidden_layers=4"),
    "a3b12": ("model=qwen3_30b_a3b", "model.num_hidden_layers=12"),
    "a3b5": ("model=qwen3_30b_a3b", "model.num_hidden_layers=5"),
    "a3b4": ("model=qwen3_30b_a3b", "model.num_hidden_layers=4", "model.vocab_size=32768"),
    "a3b2": ("model=qwen3_30b_a3b", "model.num_hidden_layers=2", "model.vocab_size=32768"),
    "small": (
        "model.hidden_size=256", "model.intermediate_size=512", "model.num_hidden_layers=3", "model.vocab_size=1024",
        "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=64",
    ),
    "tiny": (
        "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "model.vocab_size=256",
        "model.num_attention_heads=4", "model.num_key_value_heads=2", "train.loss_chunk=64",
    ),
}  # fmt: skip
SHAPES["experts"] = (
    *SHAPES["tiny"], "model.model_type=qwen3_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
)  # fmt: skip
WHAT = {"8b": "8B", "1b": "1B"} | {f"8b{n}": f"8B's widths, {n} of 32 layers" for n in (16, 8, 4)}
COMPILED, EAGER = "train.compile=true", "train.compile=false"
BASE = ("precision.compute=bf16", "optim.schedule=constant", "train.loss_chunk=2048", "mesh.zero=2", EAGER)
NARROW = ("mesh.zero=3", "optim.state_dtype=bf16")
OFFLOAD = ("optim.state_dtype=bf16", "optim.offload=true")
FP8 = "precision.compute=fp8"


def _tokens(seq_len: int, micro_batch: int, microbatches: int = 1) -> tuple[str, ...]:
    return (
        f"train.seq_len={seq_len}", f"train.micro_batch={micro_batch}",
        f"train.global_batch={micro_batch * microbatches}",
    )  # fmt: skip


def _right(tokens: tuple[str, ...]) -> tuple[Case, ...]:
    """Return the cases that check correctness: the same steps on the device and on the CPU."""
    parity = lambda words, *more: Case("small", f"parity {words}", (*tokens, *more), kind="parity", steps=3)
    return (
        parity("fp32", "precision.compute=fp32"),
        parity("bf16"),
        parity("bf16 compiled", COMPILED),
        parity("packed", "precision.compute=fp32", "data.pack=true"),
    )


@dataclass(frozen=True)
class _Steps:
    """Steps of a shape, the same in all of its timed cases.

    Attributes:
        tokens: tokens of a microbatch.
        state: overrides for the precision and sharding of the state.
        rounds: as in `Case`.
    """

    shape: str
    tokens: int
    state: tuple[str, ...] = ()
    microbatches: int = 1
    rounds: int = 0

    def case(self, words: str, *more: str, kind: Kind = "timed") -> Case:
        """Return a case. `words` begin with the length of a sequence."""
        length = int(words.split()[0])
        tokens = _tokens(length, self.tokens // length, self.microbatches)
        return Case(self.shape, words, (*tokens, *self.state, *more), kind=kind, rounds=self.rounds)

    def speed(self) -> tuple[Case, ...]:
        """Return the cases for the MFU goals."""
        return self.case("8192", COMPILED), self.case("4096", COMPILED)

    def fp8(self) -> Case:
        return self.case("8192 fp8", COMPILED, FP8)

    def profiles(self) -> tuple[Case, ...]:
        return (
            self.case("8192 profile", COMPILED, kind="profile"),
            self.case("8192 fp8 profile", COMPILED, FP8, kind="profile"),
        )

    def recompute(self, budget: str) -> tuple[Case, ...]:
        """Return a case each for selective, full and budget."""
        modes = {"selective": (), "full": (), "budget": (f"recompute.budget={budget}",)}
        return tuple(self.case(f"8192 {mode}", COMPILED, f"recompute={mode}", *own) for mode, own in modes.items())

    def rest(self) -> tuple[Case, ...]:
        """Return the cases that no goal needs: blocks without compilation, and fp8 with recompute."""
        return (
            self.case("8192 eager", EAGER),
            self.case("4096 eager", EAGER),
            self.case("8192 selective eager", EAGER, "recompute=selective"),
            self.case("8192 fp8 full", COMPILED, FP8, "recompute=full"),
        )


def _attention(shape: str, micro_batch: int, *more: str) -> tuple[Case, ...]:
    """Return a case for each attention backend. `math` keeps the scores of every layer: 2 T^2 bytes a head, a few
    times. The microbatch is therefore small."""
    tokens = (*_tokens(4096, micro_batch), COMPILED, *more)
    kinds = ("auto", "flash", "cudnn", "efficient", "math")
    return tuple(Case(shape, f"4096 attention {kind}", (*tokens, f"hardware.attention={kind}")) for kind in kinds)


def _versus(shape: str, micro_batch: int, *more: str) -> tuple[Case, ...]:
    """Return cases of ours and a peer in alternating rounds, both with the same recompute."""
    tokens = (*_tokens(8192, micro_batch), COMPILED, *more)
    again = "recompute=selective"
    pairs = (("", "native", ()), ("", "transformers", ()), ("selective ", "native", (again,)))
    return tuple(
        Case(shape, f"8192 {mode}against {peer}", (*tokens, *key), ("ours", peer)) for mode, peer, key in pairs
    )


def _mixture(alone: str, paired: str) -> tuple[Case, ...]:
    """Return the cases of 30B-A3B's layers: against `transformers`, and alone. `transformers` runs eagerly because its
    graphs break at the experts. Balancing is off, as in `transformers` by default."""
    tokens = (*_tokens(4096, 2), "moe.balance=none")
    own = (*tokens, *NARROW, COMPILED)
    return (
        Case(paired, "4096 eager against transformers", (*tokens, EAGER), ("ours", "transformers")),
        Case(alone, "4096", own),
        Case(alone, "4096 profile", own, kind="profile"),
    )


def _losses(shape: str, *more: str) -> tuple[Case, ...]:
    """Return the cases for the loss curves of fp8 and bf16. Sequences are short: 50 steps of 8,192 tokens of 8B take a
    minute."""
    tokens = (*_tokens(2048, 1), COMPILED, "optim.warmup=20", *more)
    return (
        Case(shape, "2048 losses bf16", tokens, kind="losses", steps=50),
        Case(shape, "2048 losses fp8", (*tokens, FP8), kind="losses", steps=50),
    )


def _longest(shape: str, state: tuple[str, ...], budget: str) -> tuple[Case, ...]:
    """Return the cases that search for the longest sequence. With less recompute it is shorter, and the search can be
    finer."""
    modes = {"none": 1024, "selective": 2048, "budget": 2048, "full": 8192}
    more = {"budget": (f"recompute.budget={budget}",)}
    tokens = (*_tokens(4096, 1), *state, EAGER)
    return tuple(
        Case(shape, f"longest {mode}", (*tokens, f"recompute={mode}", *more.get(mode, ())), kind="longest", start=4096,
             grain=grain)
        for mode, grain in modes.items()
    )  # fmt: skip


_RIGHT = (
    Case("1b", "4096 trains", (*_tokens(4096, 2), COMPILED, "optim.warmup=5"), kind="losses", steps=40),
    *_right(("train.loss_chunk=256", *_tokens(256, 2, 2))),
)
_SYNCS = Case("1b", "4096 host waits", (*_tokens(4096, 1), COMPILED), kind="syncs")
_OFFLOADED = Case("8b", "8192 full offloaded", (*_tokens(8192, 1), *OFFLOAD, COMPILED, "recompute=full"), rounds=1)


def _suite(
    large: _Steps,
    ones: _Steps,
    paired: str,
    beside_peer: int,
    mixtures: tuple[str, str],
    budgets: tuple[str, str],
    own: tuple[Case, ...] = (),
) -> tuple[Case, ...]:
    """Return every case, the most decisive first. Cases that take minutes are last.

    Args:
        large: steps of 8B or of the shape that replaces it.
        ones: steps of 1B.
        paired: the shape with 8B's widths that fits next to a peer.
        beside_peer: sequences of 8,192 tokens that 1B can train next to a peer.
        mixtures: shapes of 30B-A3B that fit alone, and next to a peer.
        budgets: `recompute.budget` of a step, and of the longest sequence.
        own: cases of this device alone.
    """
    selective, full, budget = large.recompute(budgets[0])
    *short, longest_full = _longest(large.shape, large.state, budgets[1])
    versus_large, versus_ones = _versus(paired, 1), _versus("1b", beside_peer)
    return (
        *_RIGHT,
        *large.speed(), selective, full,
        *ones.speed(),
        *versus_large[:2], *versus_ones[:2],
        *_mixture(*mixtures),
        large.fp8(), *_losses(large.shape, *large.state),
        *short,
        *_attention(paired, 1),
        _SYNCS,
        *large.profiles(), *ones.profiles()[:1],
        *versus_large[2:], *versus_ones[2:], *own, budget,
        *ones.recompute(budgets[0]), ones.fp8(), *_attention("1b", 1),
        *large.rest(), *ones.rest(),
        longest_full, _OFFLOADED,
    )  # fmt: skip


_NATIVE = Case(
    "8b", "8192 full, native", (*_tokens(8192, 1, 2), COMPILED, "mesh.zero=3", "recompute=full"), ("native",), rounds=2
)
_H200 = _suite(
    _Steps("8b", 8192, NARROW, 2, rounds=2),
    _Steps("1b", 32768),
    "8b8",
    2,
    ("a3b12", "a3b4"),
    ("20GiB", "40GiB"),
    (_NATIVE,),
)
_H100 = _suite(_Steps("8b16", 8192, NARROW, 2), _Steps("1b", 16384), "8b4", 1, ("a3b5", "a3b2"), ("12GiB", "20GiB"))
_SMALL = (*_tokens(64, 2), "train.loss_chunk=64")
_SMOKE = (
    Case("tiny", "trains", (*_SMALL, "optim.lr=3e-3"), kind="losses", steps=40),
    *_right((*_SMALL, "model.num_hidden_layers=2")),
    Case("tiny", "eager", _SMALL),
    Case("tiny", "full", (*_SMALL, "recompute=full")),
    Case("tiny", "budget", (*_SMALL, "recompute=budget", "recompute.budget=2MiB")),
    Case("tiny", "compiled", (*_SMALL, COMPILED, "model.num_hidden_layers=1")),
    Case("tiny", "selective", (*_SMALL, COMPILED, "model.num_hidden_layers=1", "recompute=selective")),
    Case("tiny", "against native", (*_SMALL, "recompute=selective"), ("ours", "native")),
    Case("tiny", "against transformers", _SMALL, ("ours", "transformers")),
    Case("experts", "against transformers", (*_SMALL, "moe.balance=none"), ("ours", "transformers")),
    Case("tiny", "fp8", (*_SMALL, COMPILED, "model.num_hidden_layers=1", FP8)),
    Case("tiny", "losses bf16", (*_SMALL, "optim.lr=3e-3"), kind="losses", steps=40),
    Case("tiny", "losses fp8", (*_SMALL, "optim.lr=3e-3", FP8), kind="losses", steps=40),
    Case("tiny", "longest full", (*_SMALL, "recompute=full"), kind="longest", start=64, most=320, grain=64),
    Case("tiny", "attention auto", (*_SMALL, "hardware.attention=auto")),
    Case("tiny", "host waits", _SMALL, kind="syncs"),
    Case("tiny", "profile", _SMALL, kind="profile"),
    Case("tiny", "full, native", (*_SMALL, "recompute=full"), ("native",)),
    Case("tiny", "bf16 moments", (*_SMALL, *NARROW)),
    Case("tiny", "offloaded", (*_SMALL, *OFFLOAD)),
)
SUITES = {
    "h200": Suite("NVIDIA H200 (139 GiB)", _H200, memory=139),
    "h100": Suite("NVIDIA H100 (78 GiB)", _H100, memory=78, large="8b16", paired="8b4"),
    "smoke": Suite("any device", _SMOKE, rounds=2, steps=1, warmup=1),
}


def config_of(case: Case) -> Config:
    """Return the configuration that the case's implementations train with.

    Raises:
        ConfigError: names the key.
    """
    return resolve(load_config([*SHAPES[case.shape], *BASE, *case.overrides]), 1)
