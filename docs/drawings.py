"""Draws the pictures of the documentation into docs/img/, from the code's own tables.

python docs/drawings.py            # writes docs/img/*.svg
python docs/drawings.py --check    # writes nothing; exit status 1 where a file is stale

A text that would leave its box raises an error, so a picture that is written can be read.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from ndtrain.config import AXES, ModelConfig, RecomputeConfig  # noqa: E402
from ndtrain.distributed.mesh import EP, MeshSpec  # noqa: E402
from ndtrain.distributed.row_map import Run  # noqa: E402
from ndtrain.distributed.sequence_sharding import SequenceSharding  # noqa: E402
from ndtrain.distributed.sharding import Dim, FlatLayout, Layouts, TensorLayout, UnitGroups  # noqa: E402
from ndtrain.engine.instructions import Instruction, Layer, expand, line_up  # noqa: E402
from ndtrain.model import Segment, dim_sizes, tensor_dims  # noqa: E402
from ndtrain.model.transformer import layer, unit_of  # noqa: E402
from ndtrain.parallel.recompute import plan_recompute  # noqa: E402
from ndtrain.report import picture  # noqa: E402
from ndtrain.report.runs import read_run  # noqa: E402
from ndtrain.report.svg import render_svg  # noqa: E402
from ndtrain.schedule import Action, Schedule, build, simulate  # noqa: E402
from ndtrain.schedule.draw import LEGEND, panel  # noqa: E402
from ndtrain.schedule.generate import GENERATORS  # noqa: E402
from tests.test_package import ORDER  # noqa: E402

# Okabe and Ito's palette, which colour-blind people can tell apart
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW = "#56b4e9", "#d55e00", "#f0e442"
INK, GREY, RULE, PALE, WHITE = "#1a1a1a", "#5a5f66", "#b8bec6", "#f3f5f7", "#ffffff"
LIGHT = {BLUE: "#d3e8f5", ORANGE: "#fcebc8", GREEN: "#cdeee3", PURPLE: "#f5e1ec", SKY: "#dff1fc", VERMILION: "#fadfcd"}
RANKS = (BLUE, ORANGE, GREEN, PURPLE)  # of four ranks
DARK = {BLUE, GREEN, VERMILION}  # colours that white text is read on
FONT = "Helvetica,Arial,'DejaVu Sans',sans-serif"
MONO = "Menlo,Consolas,'DejaVu Sans Mono',monospace"


# ------------------------------------------------------------------------------------------------------------- canvas


def text_width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Pixels that a text takes at most, in the widest of the fonts named above."""
    return 0.61 * size * len(text) if mono else picture.text_width(text, size, bold)


class Canvas:
    """An SVG that grows by rectangles, texts and arrows; positions and sizes are in pixels."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = WHITE, line: str = RULE, round_: float = 3
    ) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{round_}" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        room: float | None = None,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """A line of text whose baseline is at y.

        Raises:
            ValueError: it is wider than `room`, or leaves the picture.
        """
        width = text_width(text, size, mono, bold)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if (room is not None and width > room + 0.5) or left < -0.5 or left + width > self.width + 0.5:
            raise ValueError(f"{self.title}: {text!r} is {width:.0f} pixels wide, too many for its place")
        style = f' text-anchor="{anchor}"' * (anchor != "start") + ' font-weight="600"' * bold
        style += f' font-family="{escape(MONO)}"' * mono
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{style}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, lines: Sequence[str], fill: str = WHITE, **style) -> None:
        """A rectangle with centred lines of text."""
        size, line = style.pop("size", 13), style.pop("line", RULE)
        self.rect(x, y, w, h, fill, line)
        colour = style.pop("ink", WHITE if fill in DARK else INK)
        step = size + 3
        if step * len(lines) > h + 3:
            raise ValueError(f"{self.title}: {lines} are too many lines for their box")
        top = y + h / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        for i, text in enumerate(lines):
            self.text(x + w / 2, top + i * step, text, size, w - 4, "middle", colour, **style)

    def notes(self, y: float, lines: Sequence[str], room: float = 960) -> None:
        """Lines of text below a picture, the first with its baseline at y."""
        for i, line in enumerate(lines):
            self.text(20, y + 21 * i, line, 13, room)

    def line(self, *points: tuple[float, float], colour: str = GREY, width: float = 1.5, dash: str = "") -> None:
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def arrow(self, *points: tuple[float, float], colour: str = GREY, width: float = 1.5) -> None:
        """A line whose last point has a head."""
        self.line(*points, colour=colour, width=width)
        (x0, y0), (x, y) = points[-2:]
        length = max(abs(x - x0), abs(y - y0)) or 1
        dx, dy = (x - x0) / length, (y - y0) / length
        back, side = 7, 4
        corners = [(x, y), (x - back * dx - side * dy, y - back * dy + side * dx)]
        corners.append((x - back * dx + side * dy, y - back * dy - side * dx))
        self.parts.append(f'<path d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in corners)} Z" fill="{colour}"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{escape(FONT)}" role="img">'
        back = f'<rect width="{self.width}" height="{self.height}" fill="{WHITE}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", back, *self.parts, "</svg>"]) + "\n"


def ink_on(fill: str) -> str:
    return WHITE if fill in DARK else INK


# ------------------------------------------------------------------------------------------------------- architecture

PHRASES = {
    "arguments": "key=value arguments of commands, near misses",
    "schedule": "pipeline schedules as tables, their checker and simulator",
    "config": "the typed schema, composition by Hydra, all checks",
    "plugins": "decorators that add parts of a user's own",
    "model": "the plain transformer and its families; no mesh",
    "distributed": "mesh, layouts and runs, collectives",
    "data": "corpora to tokens; a batch is a function of (seed, step)",
    "optim": "optimizers, learning-rate schedules",
    "parallel": "tp cp ep fsdp dp pp, recompute, and how they compose",
    "checkpoint": "whole tensors in safetensors, written in place",
    "generate": "continues a text with a plain model",
    "profiling": "where a step's time and memory go",
    "metrics": "console, metrics.jsonl, wandb, MFU",
    "runtime": "command line, rendezvous, signals, exit status, hangs",
    "engine": "instructions, executor, training step, trainer",
    "train": "wires a run",
    "evaluate": "the loss of a checkpoint on any mesh",
    "report": "a page with the curves of runs",
    "bench": "measurements against peers",
    "plan": "what a mesh needs, without its machines",
    "preflight": "checks of hosts and links before a run",
}
STEP = [
    ("data", "the batch of (seed, step)", "this rank's rows, and its tokens of each"),
    ("schedule", "this rank's row of actions", "F, B, I, W of a microbatch on a stage"),
    ("engine", "each action becomes instructions", "run a layer forward or backward, ..."),
    ("parallel", "unshard and prefetch a unit's weights", "all-gather over fsdp x cp"),
    ("model", "the layer computes", "tp and cp replace its calls"),
    ("parallel", "send to the next stage", "pp: activations, and gradients back"),
    ("parallel", "sum each gradient, then make its norm", "over the axes of its partial set"),
    ("optim", "clip, and update of this rank's shard", "or skip, where something is not finite"),
    ("metrics", "loss, norm, tokens/s, MFU", "read one step later: nothing waits"),
    ("checkpoint", "every so many steps: owners write runs", "in the background if asked to"),
]


def architecture() -> str:
    """The packages in import order, and a step's way through them."""
    if list(PHRASES) != ORDER:
        raise ValueError("architecture: PHRASES must name the packages of tests/test_package.py ORDER, in its order")
    row, used = 37, {name for name, *_ in STEP}
    foot = 46 + row * len(ORDER) + 13
    c = Canvas("The packages of ndtrain in import order, and what a training step does in them", 1000, foot + 9)
    c.text(20, 30, "Packages: each imports only from those above it", 15, bold=True)
    c.text(560, 30, "A training step, on every rank", 15, bold=True)
    c.text(
        20,
        foot,
        "Blue: named on the right. distributed serves them all.",
        12,
        530,
        fill=GREY,
    )
    for i, name in enumerate(ORDER):
        y = 46 + i * row
        c.rect(20, y, 500, 31, LIGHT[SKY] if name in used else PALE)
        c.text(30, y + 20, name, 13, 92, bold=True)
        c.text(126, y + 20, PHRASES[name], 12, 388)
    _step_column(c)
    return c.svg()


def _step_column(c: Canvas) -> None:
    pitch, h = 60, 46
    for i, (package, what, how) in enumerate(STEP):
        y = 46 + i * pitch
        c.rect(560, y, 420, h, WHITE, BLUE)
        c.box(560, y, 98, h, [package], LIGHT[SKY], size=12, line=BLUE)
        c.text(668, y + 19, what, 13, 308)
        c.text(668, y + 36, how, 12, 308, fill=GREY)
        if i + 1 < len(STEP):
            c.arrow((770, y + h), (770, y + pitch - 1))
    top, bottom = 46 + 2 * pitch + h / 2, 46 + 5 * pitch + h / 2
    c.arrow((560, bottom), (541, bottom), (541, top), (559, top))


# ------------------------------------------------------------------------------------------------------- layout, fsdp


def layout_runs() -> str:
    """Two matrices over tp=2 and fsdp=2: which element is whose, and the runs that say so."""
    c = Canvas("How two matrices are sharded over tp=2 and fsdp=2, and the runs of each rank", 1000, 480)
    mesh = MeshSpec(AXES, (1, 1, 2, 1, 2))
    dims = {"heads": Dim("heads", 2, 2), "embed": Dim("embed", 8)}
    tensors = {"q_proj.weight": ("heads", "embed"), "o_proj.weight": ("embed", "heads")}
    c.text(
        20,
        30,
        "dims, rules {heads: tp} and a rank's coords give its runs (global_start, local_start, length)",
        15,
        bold=True,
    )
    for i, (name, names) in enumerate(tensors.items()):
        table = {name: tuple(dims[d] for d in names)}
        ranks = [Layouts(table, {"heads": "tp"}, mesh, rank)[name] for rank in range(mesh.world_size)]
        _runs_panel(c, 20 + 490 * i, ranks, mesh, dims)
    notes = [
        "tp takes whole heads. What a tp rank has left is",
        "one row of elements, which fsdp cuts evenly.",
        "A run is contiguous in both.",
    ]
    c.notes(240, notes, 470)
    return c.svg()


def _runs_panel(c: Canvas, x: float, ranks: Sequence[TensorLayout], mesh: MeshSpec, dims: dict[str, Dim]) -> None:
    t = ranks[0]
    rows, columns = t.shape
    role = "column: its outputs are sharded" if t.shard_dim == 0 else "row: its inputs are sharded"
    c.text(x, 62, f"{t.name}  [{t.dims[0].name}, {t.dims[1].name}] = [{rows}, {columns}]", 13, 470, bold=True)
    c.text(x, 80, f"heads = {dims['heads'].units} x head_dim {dims['heads'].width}; {role}", 12, 470, fill=GREY)
    flats = [FlatLayout.of([layout], UnitGroups(shards=mesh.size("fsdp"))) for layout in ranks]
    runs = [f.runs(*f.bounds(mesh.coords(r)["fsdp"]))[0][1] for r, f in enumerate(flats)]
    owner = {run.global_start + k: r for r, of_rank in enumerate(runs) for run in of_rank for k in range(run.length)}
    cell, top = 27, 94
    for at, rank in owner.items():
        row, column = divmod(at, columns)
        y = top + row * cell
        c.box(x + column * cell, y, cell, cell, [str(at)], RANKS[rank], size=11, line=WHITE)
    c.text(x + columns * cell + 10, top + 12, "number: offset in the", 12, fill=GREY)
    c.text(x + columns * cell + 10, top + 28, "row-major tensor", 12, fill=GREY)
    for rank, of_rank in enumerate(runs):
        _runs_row(c, x, 328 + rank * 36, mesh.where(rank), RANKS[rank], of_rank)


def _runs_row(c: Canvas, x: float, y: float, where: str, colour: str, runs: Sequence[Run]) -> None:
    c.box(x, y, 108, 26, [where], colour, size=12)
    c.text(
        x + 116, y + 17, " ".join(f"({r.global_start},{r.local_start},{r.length})" for r in runs), 11, 370, mono=True
    )


def flat_fsdp() -> str:
    """The flat buffer of one block, and what happens to it in a step."""
    c = Canvas("The flat buffer of one block, cut over four ranks of fsdp x cp", 1000, 480)
    m = ModelConfig(
        hidden_size=6,
        intermediate_size=9,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        num_hidden_layers=1,
    )
    sizes, mesh = dim_sizes(m), MeshSpec(AXES, (1, 1, 4, 1, 1))
    tensors = {name: tuple(Dim(d, *sizes[d]) for d in dims) for name, dims in tensor_dims(m).items()}
    layouts = Layouts(tensors, {}, mesh, 0)
    flat = FlatLayout.of(
        [layouts[n] for n in tensors if unit_of(n) == layer(0)], layouts.groups(f"{layer(0)}.input_layernorm.weight")
    )
    c.text(20, 30, "One unit (a block): its parameters are views of one flat buffer", 15, bold=True)
    scale, x, y = 950 / flat.numel, 25, 92
    c.text(x, 62, f"matrices: {flat.matrix_numel} elements, with weight decay", 12, fill=GREY)
    for i, (t, first, last) in enumerate(flat.tensors_in(0, flat.numel)):
        leaf = t.name.split(".")[-2].replace("_layernorm", "")
        w, matrix = (last - first) * scale, len(t.dims) > 1
        c.rect(x + first * scale, y, w, 40, LIGHT[SKY] if matrix else LIGHT[ORANGE], INK, 0)
        if matrix:
            c.text(x + first * scale + w / 2, y + (18 if i % 2 else 30), leaf, 11, None, "middle")
    used = flat.offsets[flat.tensors[-1].name] + flat.tensors[-1].local_numel
    c.rect(x + used * scale, y, (flat.numel - used) * scale, 40, GREY, INK, 0)
    c.line((x + flat.matrix_numel * scale, y - 4), (x + flat.matrix_numel * scale, 70), colour=GREY)
    c.text(x + flat.numel * scale, 62, "vectors (two norms), padding", 12, anchor="end", fill=GREY)
    for part in range(flat.groups.shards):
        start, stop = flat.bounds(part)
        c.box(
            x + start * scale,
            140,
            (stop - start) * scale,
            28,
            [f"shard of rank {part}: elements {start} to {stop - 1}"],
            RANKS[part],
            size=12,
        )
    _unit_life(c)
    return c.svg()


def _unit_life(c: Canvas) -> None:
    """When three units are gathered, computed and reduced in one microbatch, as `expand` orders it for zero=3."""
    c.text(20, 205, "When three units are gathered, computed and reduced, with mesh.zero=3", 15, bold=True)
    run: Callable = lambda x, ctx: x
    layers = line_up({0: [Segment((str(i),), run) for i in range(3)]}, last_stage=1)
    actions = expand([Action("F", 0, 0), Action("B", 0, 0)], layers, [], ahead=1)
    slots, w = [ins for action in actions for ins in action], 100
    for i, lane in enumerate(("all-gather", "compute", "reduce-scatter")):
        c.text(20, 242 + 40 * i, lane, 12, fill=GREY)
        c.rect(120, 222 + 40 * i, 8 * (w + 6), 32, PALE, PALE)
    cell = lambda slot, lane, text, fill: c.box(
        120 + slot * (w + 6), 223 + 40 * lane, w, 30, [text], LIGHT[fill], size=12
    )
    here = set(slots[0].weights)
    cell(0, 0, f"unit {slots[0].weights[0]}", GREEN)
    for slot, ins in enumerate(slots, 1):
        unit = layers[ins.layer].units[0]
        cell(slot, 1, f"{'forward' if ins.kind == 'F' else 'backward'} {unit}", BLUE)
        for name in set(ins.prefetch) - here:
            cell(slot, 0, f"unit {name}", GREEN)
        here |= set(ins.prefetch)
        here -= set(ins.weights) if ins.reshard else set()
        for name, _ in ins.reduce:
            cell(slot + 1, 2, f"unit {name}", VERMILION)
    notes = [
        "Unit 1 is prefetched while unit 0 computes. After its forward unit 0 is resharded: its buffer is freed.",
        "Unit 2 is read next by its own backward, so it stays. Gradients are written into a flat buffer of their own,",
        "which is reduce-scattered while the next backward runs. A rank adds the sum for its shard to its gradient.",
        "zero=2 keeps the gathered parameters. zero=1 also keeps the whole gradient, and reduce-scatters once a step.",
        "The optimizer updates the shard in two slices a unit: matrices, which decay, and vectors, which do not.",
    ]
    c.notes(370, notes, 970)


# ----------------------------------------------------------------------------------------------------------- tp and cp


def tp_column_row() -> str:
    """Attention and MLP of a block over tp=2 with sequence parallelism: who holds what, and what is sent."""
    c = Canvas("Column and row parallel matmuls of a block over tp=2, with sequence parallelism", 1000, 520)
    m = ModelConfig(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        num_hidden_layers=1,
    )
    sizes, mesh = dim_sizes(m), MeshSpec(AXES, (1, 1, 1, 1, 2))
    tensors = {n: tuple(Dim(d, *sizes[d]) for d in dims) for n, dims in tensor_dims(m).items()}
    rules = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
    layouts = Layouts(tensors, rules, mesh, 0)
    shard = {
        leaf: layouts[f"{layer(0)}.{leaf}.weight"].shard_dim
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    }
    c.text(20, 30, "tp=2 with sequence parallelism: half of every matrix on each rank", 15, bold=True)
    halves = (
        ("attention", "q, k, v proj", shard["self_attn.q_proj"], "attention", "o_proj", shard["self_attn.o_proj"]),
        ("MLP", "gate, up proj", shard["mlp.gate_proj"], "SwiGLU", "down_proj", shard["mlp.down_proj"]),
    )
    for i, half in enumerate(halves):
        _tp_half(c, 50 + i * 222, *half)
    notes = [
        "Column: a rank holds a share of the outputs (rows of the weight [out, in]) and sees all tokens.",
        "Row: a rank holds a share of the inputs (columns of the weight); its outputs are partial sums of all ranks.",
    ]
    c.notes(488, notes, 970)
    return c.svg()


def _tp_half(
    c: Canvas, y: float, name: str, first: str, first_dim: int, core: str, second: str, second_dim: int
) -> None:
    c.text(20, y + 18, f"{name}: {first} and {second}", 13, bold=True)
    core_words = [core, "on its own heads"] if core == "attention" else [core, "on its own part"]
    for rank in range(2):
        top = y + 32 + rank * 78
        colour = RANKS[rank]
        c.box(20, top, 118, 62, [f"rank tp={rank}:", "norm of its share", "of the tokens"], LIGHT[colour], size=12)
        _matrix(c, 262, top, first, first_dim, rank)
        c.box(448, top, 124, 62, core_words, LIGHT[colour], size=12)
        _matrix(c, 594, top, second, second_dim, rank)
        c.box(884, top, 100, 62, [f"rank tp={rank}:", "its share of", "the tokens"], LIGHT[colour], size=12)
        for a, b in ((138, 149), (248, 261), (412, 447), (572, 593), (732, 767), (868, 883)):
            c.arrow((a, top + 31), (b, top + 31))
    for x, w, word, what in ((150, 98, "all-gather", "all tokens"), (768, 100, "reduce-", "scatter")):
        c.box(x, y + 32, w, 140, [word, what], LIGHT[GREEN], size=12, line=GREEN)


def _matrix(c: Canvas, x: float, y: float, name: str, dim: int | None, rank: int) -> None:
    """A weight [out, in] with the part that a rank holds in its colour."""
    side = 62
    c.rect(x, y, side, side, WHITE, RULE, 0)
    w, h = (side, side / 2) if dim == 0 else (side / 2, side)
    c.rect(x + (rank * w if dim == 1 else 0), y + (rank * h if dim == 0 else 0), w, h, RANKS[rank], INK, 0)
    role = {0: "column", 1: "row", None: "replicated"}[dim]
    c.text(x + side + 6, y + 27, name, 12, 98)
    c.text(x + side + 6, y + 43, role, 12, 98, fill=GREY)


def ring_zigzag() -> str:
    """How a sequence is dealt to four ranks, and what each computes in each step of the ring."""
    c = Canvas("Sequence sharding over cp=4, and the steps of ring attention", 1000, 560)
    length, ring = 16, 4
    c.text(20, 30, "A sequence of 16 tokens over a ring of 4: who holds which token", 15, bold=True)
    cell, left = 34, 100
    c.text(left + length * cell + 20, 56, "scores under the causal mask, by rank", 12, fill=GREY)
    for i, balance in enumerate(("zigzag", "striped", "none")):
        sharding, y = SequenceSharding(length, ring=ring, balance=balance), 66 + 42 * i
        c.text(20, y + 21, balance, 13, bold=True)
        for rank in range(ring):
            for t in sharding.index(rank):
                c.box(left + int(t) * cell, y, cell, 32, [str(t)], RANKS[rank], size=12, line=WHITE)
            work = sum(int(t) + 1 for t in sharding.index(rank))
            c.box(left + length * cell + 20 + rank * 72, y, 66, 32, [str(work)], RANKS[rank], size=12)
    _ring_steps(c, SequenceSharding(length, ring=ring, balance="zigzag"), 230)
    notes = [
        "Queries stay. Keys and values move one rank on after each step; the next ones travel while a step computes.",
        "The parts of a step's result are merged by their log-sum-exp. Pairs that the mask hides are not computed.",
    ]
    c.notes(522, notes, 970)
    return c.svg()


def _ring_steps(c: Canvas, sharding: SequenceSharding, y: float) -> None:
    c.text(20, y, "Ring attention with zigzag: whose keys and values a rank has in each step", 15, bold=True)
    ring = sharding.ring
    for step in range(ring):
        c.text(190 + 205 * step + 90, y + 26, f"step {step}", 12, None, "middle", GREY)
    for rank in range(ring):
        top = y + 36 + rank * 58
        c.box(20, top, 130, 48, [f"rank {rank}", "queries " + _spans(sharding, rank)], LIGHT[RANKS[rank]], size=12)
        for step in range(ring):
            holder = (rank - step) % ring
            queries, keys = sharding.index(rank), sharding.index(holder)
            seen = int((queries[:, None] >= keys[None, :]).sum())
            words = [f"keys {_spans(sharding, holder)}", f"{seen} scores"]
            c.box(190 + 205 * step, top, 180, 48, words, RANKS[holder], size=12)
            if step + 1 < ring:
                c.arrow((371 + 205 * step, top + 24), (394 + 205 * step, top + 24))


def _spans(sharding: SequenceSharding, rank: int) -> str:
    """The tokens of a rank as "0-1, 14-15"."""
    pieces = sharding.pieces(rank)
    return ", ".join(f"{p.first}-{p.first + p.count - 1}" for p in pieces)


# ----------------------------------------------------------------------------------------------------------- pipelines

KINDS = {"F": BLUE, "B": VERMILION, "I": PURPLE, "W": YELLOW}


def pipeline_schedules() -> str:
    """Every generated schedule over four ranks, on one time scale."""
    pp, microbatches = 4, 8
    schedules = {name: build(name, pp, microbatches) for name in GENERATORS}
    timelines = {name: simulate(s, _shares(s)) for name, s in schedules.items()}
    longest = max(t.makespan for t in timelines.values())
    row, head, gap = 22, 26, 22
    each = head + row * pp + gap
    c = Canvas("All pipeline schedules over four ranks and eight microbatches", 1000, 76 + each * len(schedules))
    _schedule_legend(c)
    for i, (name, timeline) in enumerate(timelines.items()):
        y = 72 + i * each
        c.text(20, y + 13, panel(timeline, name).title, 13, 970, bold=True)
        for rank, spans in enumerate(timeline.spans):
            top = y + head + rank * row
            c.text(20, top + 14, f"rank {rank}", 11, fill=GREY)
            c.rect(70, top, 910 * timeline.makespan / longest, row - 3, PALE, PALE, 0)
            chunks = timeline.schedule.stages_of(rank)
            for s in spans:
                _action(
                    c, 70 + s.start * 910 / longest, top, (s.end - s.start) * 910 / longest, row - 3, s.action, chunks
                )
    return c.svg()


def _shares(s: Schedule) -> dict[str, float]:
    """Costs of one microbatch on a rank's stages together, the same in all schedules."""
    chunks = s.stages / s.pp
    return {"F": 1 / chunks, "I": 1 / chunks, "W": 1 / chunks, "B": 2 / chunks}


def _action(c: Canvas, x: float, y: float, w: float, h: float, action, chunks: Sequence[int]) -> None:
    c.rect(x, y, w, h, KINDS[action.kind], WHITE, 0)
    if w >= 12:
        c.text(x + w / 2, y + 13, str(action.microbatch), 11, None, "middle", ink_on(KINDS[action.kind]))
    if len(chunks) > 1 and action.stage == chunks[-1]:
        c.rect(x + 1, y + h - 4, w - 2, 3.5, INK, INK, 0)


def _schedule_legend(c: Canvas) -> None:
    c.text(
        20,
        28,
        "Schedules over pp=4 with 8 microbatches (forward 1, input gradient 1, weight gradient 1)",
        15,
        bold=True,
    )
    x = 20.0
    for kind, word in LEGEND.items():
        c.box(x, 42, 24, 18, [kind], KINDS[kind], size=11)
        c.text(x + 30, 56, word, 12)
        x += 50 + text_width(word, 12)
    c.rect(x, 42, 24, 18, PALE, RULE, 0)
    c.rect(x + 1, 56, 22, 3.5, INK, INK, 0)
    c.text(x + 30, 56, "the rank's second chunk", 12)
    c.text(x + 200, 56, "numbers: microbatches", 12)


def step_instructions() -> str:
    """The instructions of the last rank of a pipeline for one forward and one backward action."""
    c = Canvas("How the actions of a step become instructions", 1000, 556)
    schedule = build("1f1b", 2, 2)
    row = schedule.table[1]
    layers = _last_stage([2, 3])
    groups = plan_recompute([0, 1], RecomputeConfig(name="full"))
    actions = expand(row, layers, groups, ahead=1)
    c.text(20, 30, "1f1b, pp=2, 2 microbatches, recompute=full, zero=3: the last rank's row", 15, bold=True)
    for i, a in enumerate(row):
        c.box(
            20 + 240 * i,
            44,
            230,
            28,
            [f"{a.kind}: {LEGEND[a.kind]} of microbatch {a.microbatch}"],
            KINDS[a.kind],
            size=12,
        )
    heads = (("instruction", 64), ("unshard", 300), ("prefetch", 460), ("reshard", 620), ("reduce-scatter", 740))
    for name, x in heads:
        c.text(x, 98, name, 12, fill=GREY)
    y = 106.0
    for number in (0, 1):
        y = _action_rows(c, y, row[number].kind, actions[number], layers)
    notes = [
        "The list is made once. Head and loss run forward inside the backward action. A block that is recomputed",
        "runs without a graph first, and with one in its backward. What the next one reads too is not resharded.",
    ]
    c.notes(y + 14, notes)
    return c.svg()


def _last_stage(blocks: Sequence[int]) -> list[Layer]:
    run: Callable = lambda x, ctx: x
    segments = [Segment((layer(i),), run) for i in blocks] + [Segment(("model.norm",), run), Segment(("lm_head",), run)]
    return line_up({1: segments}, last_stage=1)


def _action_rows(c: Canvas, y: float, kind: str, instructions: Sequence[Instruction], layers: Sequence[Layer]) -> float:
    h = 38
    c.box(20, y, 34, h * len(instructions) - 4, [kind], KINDS[kind], size=14)
    for ins in instructions:
        words = _instruction_words(ins, layers)
        c.rect(60, y, 920, h - 4, PALE, PALE)
        c.box(60, y, 226, h - 4, [words[0]], LIGHT[BLUE] if ins.kind == "F" else LIGHT[VERMILION], size=12)
        for text, x, room in zip(words[1:], (300, 460, 620, 740), (150, 150, 110, 235), strict=True):
            c.text(x, y + 21, text, 12, room)
        y += h
    return y + 10


def _instruction_words(ins: Instruction, layers: Sequence[Layer]) -> tuple[str, str, str, str, str]:
    short = lambda unit: unit.removeprefix("model.")
    unit = short(layers[ins.layer].units[0])
    kind = "recompute" if ins.recompute else {"F": "forward", "B": "backward"}[ins.kind]
    what = f"{kind} {unit}" + ", no graph" * (ins.kind == "F" and not ins.keep_graph)
    names = lambda units: ", ".join(map(short, units))
    reduce = ", ".join(short(u) + " (the step's last)" * final for u, final in ins.reduce)
    return what, names(ins.weights), names(ins.prefetch), "yes" if ins.reshard else "", reduce


# ---------------------------------------------------------------------------------------------------------------- mesh

AXIS_WORDS = {
    "pp": ("layers", "activations to the next stage, their gradients back", PURPLE),
    "dp": ("sequences; state is replicated", "all-reduce of finished gradient shards", GREY),
    "fsdp": ("sequences, and the state of a unit", "all-gather of weights, reduce-scatter of gradients", GREEN),
    "cp": ("tokens of a sequence, and the state", "keys and values around a ring, or heads for tokens", GREY),
    "tp": ("heads, MLP, vocabulary, and tokens between", "all-gather and reduce-scatter around matmuls", BLUE),
    "ep": ("experts, over the ranks of dp, fsdp and cp", "tokens to their experts, and their outputs back", GREY),
}


def mesh() -> str:
    """Eight ranks on a mesh of pp=2 fsdp=2 tp=2, the groups of each axis, and what every axis shards and sends."""
    c = Canvas("A mesh of pp=2 fsdp=2 tp=2 over eight ranks, and what each axis shards and sends", 1000, 670)
    spec = MeshSpec(AXES, (2, 1, 2, 1, 2))
    c.text(20, 30, "mesh.pp=2 mesh.fsdp=2 mesh.tp=2: eight ranks, the last axis innermost", 15, bold=True)
    for pp in range(2):
        x = 20 + 330 * pp
        c.rect(x, 46, 310, 262, LIGHT[PURPLE], PURPLE, 8)
        c.text(x + 14, 68, f"pp={pp}", 13, bold=True)
        for fsdp in range(2):
            y = 78 + 114 * fsdp
            c.rect(x + 14, y, 282, 102, LIGHT[GREEN], GREEN, 8)
            c.text(x + 26, y + 20, f"fsdp={fsdp}", 13, bold=True)
            for tp in range(2):
                rank = spec.rank({"pp": pp, "dp": 0, "fsdp": fsdp, "cp": 0, "tp": tp})
                c.box(x + 28 + 132 * tp, y + 32, 122, 56, [f"rank {rank}", f"tp={tp}"], LIGHT[BLUE], line=BLUE, size=13)
    c.text(690, 68, "Groups: ranks that differ", 13, bold=True)
    c.text(690, 86, "in one coordinate only", 13, bold=True)
    for i, axis in enumerate(("tp", "fsdp", "pp")):
        c.box(690, 104 + 66 * i, 60, 52, [axis], LIGHT[AXIS_WORDS[axis][2]], size=13)
        groups = [" ".join(map(str, g)) for g in spec.groups(axis)]
        c.text(762, 125 + 66 * i, f"({groups[0]}) ({groups[1]})", 13, 230)
        c.text(762, 145 + 66 * i, f"({groups[2]}) ({groups[3]})", 13, 230)
    _axis_table(c)
    return c.svg()


def _axis_table(c: Canvas) -> None:
    for x, head in ((20, "axis"), (110, "what it shards"), (440, "what it sends")):
        c.text(x, 346, head, 13, bold=True)
    for i, axis in enumerate((*AXES, EP)):
        shards, sends, colour = AXIS_WORDS[axis]
        y = 356 + 50 * i
        c.rect(20, y, 960, 42, PALE, PALE)
        c.box(20, y, 70, 42, [axis], LIGHT.get(colour, WHITE), size=13)
        c.text(110, y + 26, shards, 13, 322)
        c.text(440, y + 26, sends, 13, 535)


# ---------------------------------------------------------------------------------------------------------------- main


class Drawing(NamedTuple):
    """A file of docs/img and what draws it."""

    name: str
    draw: Callable[[], str]


def loss_curve() -> str:
    """The loss of the README's first command, as `ndtrain report RUN svg=...` draws it."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks" / "llama_small-cpu-2"
    return render_svg([read_run(folder, "recipe=llama_small")])


def moe_loss_curve() -> str:
    """The loss of moe_small and of llama_small, with the same tokens a step, in about equal time."""
    folder = ROOT / "benchmarks"
    names = {
        "llama_small-4096-cpu-1": "llama_small",
        "moe_small-cpu-1": "moe_small",
    }
    return render_svg([read_run(folder / run, name) for run, name in names.items()])


DRAWINGS = [
    Drawing(f.__name__ + ".svg", f)
    for f in (
        architecture,
        layout_runs,
        flat_fsdp,
        tp_column_row,
        ring_zigzag,
        pipeline_schedules,
        step_instructions,
        mesh,
        loss_curve,
        moe_loss_curve,
    )
]


def update(made: Iterable[tuple[str, str]], script: str, args: Sequence[str]) -> int:
    """Writes pictures, (file name, text) each, or with --check compares them; the exit status.

    Args:
        script: that makes them.
    """
    stale = []
    for name, text in made:
        path = DOCS / "img" / name
        if "--check" not in args:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python docs/{script}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(update(((name, draw()) for name, draw in DRAWINGS), "drawings.py", sys.argv[1:]))
