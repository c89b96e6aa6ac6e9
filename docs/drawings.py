"""Draws the pictures of the documentation into docs/img/, from the code's own tables.

python docs/drawings.py            # writes docs/img/*.svg
python docs/drawings.py --check    # writes nothing; exit status 1 where a file is stale

A text that would leave its box raises an error, so a picture that is written can be read. All pictures are as wide as
a phone's page can show: at 390 pixels the smallest text is still 9 pixels high.
"""

import json
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from written import update

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from ndtrain.config import AXES, ModelConfig, RecomputeConfig  # noqa: E402
from ndtrain.mesh.mesh import EP, MeshSpec  # noqa: E402
from ndtrain.mesh.row_map import Run  # noqa: E402
from ndtrain.mesh.sequence_sharding import SequenceSharding  # noqa: E402
from ndtrain.mesh.sharding import Dim, FlatLayout, Layouts, TensorLayout, UnitGroups  # noqa: E402
from ndtrain.model import Segment, dim_sizes, params, tensor_dims  # noqa: E402
from ndtrain.model.transformer import layer  # noqa: E402
from ndtrain.parallel.recompute import RecomputeOps, plan_recompute  # noqa: E402
from ndtrain.program.passes import Instruction, Layer, expand, line_up  # noqa: E402
from ndtrain.report import picture  # noqa: E402
from ndtrain.report.runs import Run as LoggedRun  # noqa: E402
from ndtrain.report.runs import read_run  # noqa: E402
from ndtrain.report.svg import render_svg  # noqa: E402
from ndtrain.schedule import Action, Schedule, Span, build, simulate  # noqa: E402
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
WIDTH, LEFT = 460, 16  # pixels: of every picture, and of its margins
ROOM = WIDTH - 2 * LEFT


# ------------------------------------------------------------------------------------------------------------- canvas


def text_width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Pixels that a text takes at most, in the widest of the fonts named above."""
    return 0.61 * size * len(text) if mono else picture.text_width(text, size, bold)


class Canvas:
    """An SVG that grows downwards by rectangles, texts and arrows; positions and sizes are in pixels."""

    def __init__(self, title: str):
        self.title, self.foot = title, 0.0
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = WHITE, line: str = RULE, round_: float = 3
    ) -> None:
        self.foot = max(self.foot, y + h)
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
        if (room is not None and width > room + 0.5) or left < -0.5 or left + width > WIDTH + 0.5:
            raise ValueError(f"{self.title}: {text!r} is {width:.0f} pixels wide, too many for its place")
        self.foot = max(self.foot, y)
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

    def heading(self, y: float, text: str) -> float:
        """A bold line, wrapped where it is too long. Returns where the next thing may begin."""
        return self._lines(y, text, 15, bold=True) + 10

    def note(self, text: str) -> None:
        """A paragraph below everything that is drawn so far."""
        self._lines(self.foot + 12, text, 13)

    def _lines(self, y: float, text: str, size: int, **style) -> float:
        line = ""
        for word in text.split():
            if text_width(f"{line} {word}", size, **style) > ROOM:
                y += size + 6
                self.text(LEFT, y, line, size, **style)
                line = ""
            line = f"{line} {word}".strip()
        y += size + 6
        self.text(LEFT, y, line, size, **style)
        return y

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
        height = round(self.foot + LEFT)
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{escape(FONT)}" role="img">'
        back = f'<rect width="{WIDTH}" height="{height}" fill="{WHITE}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", back, *self.parts, "</svg>"]) + "\n"


def ink_on(fill: str) -> str:
    return WHITE if fill in DARK else INK


# ------------------------------------------------------------------------------------------------------- architecture

PHRASES = {
    "arguments": "key=value arguments of commands",
    "schedule": "pipeline schedules: tables, checker, simulator",
    "config": "the typed schema, composition, all checks",
    "plugins": "decorators for parts of a user's own",
    "device": "kinds of devices, cores, memory, peak rates",
    "model": "the plain transformer and its families; no mesh",
    "mesh": "axes, layouts, row maps, collectives, transfers",
    "data": "corpora to tokens; the batch of (seed, step)",
    "optim": "optimizers, learning-rate schedules",
    "parallel": "tp cp ep fsdp dp pp, recompute",
    "program": "a step as a list of ops; their legal order",
    "checkpoint": "whole tensors in safetensors",
    "islands": "whole jobs that train one model together",
    "observe": "metrics, loggers, profiles, slow ranks",
    "run": "command line, rendezvous, exit status, hangs",
    "engine": "executor, step, trainer, evaluation, texts",
    "train": "the command that trains",
    "evaluate": "the command for the loss of a checkpoint",
    "generate": "the command that continues a text",
    "report": "a page with the curves of runs",
    "measure": "ranks, rounds and steps that are timed",
    "bench": "ndtrain's own benchmarks",
    "plan": "what a mesh needs, without its machines",
    "preflight": "checks of hosts and links before a run",
}
STEP = [
    ("data", "the batch of (seed, step)", "this rank's rows, and its part of each"),
    ("schedule", "this rank's row of actions", "F, B, I, W of a microbatch on a stage"),
    ("program", "each action becomes ops", "gather, run a layer, reduce, send, ..."),
    ("parallel", "unshard and prefetch weights", "all-gather over fsdp x cp"),
    ("model", "the layer computes", "tp and cp replace its calls"),
    ("parallel", "send to the next stage", "pp: activations, and gradients back"),
    ("parallel", "sum each gradient, make its norm", "over the axes of its partial set"),
    ("optim", "clip, and update this rank's shard", "or skip, if something is not finite"),
    ("observe", "loss, norm, tokens/s, MFU", "read one step later: nothing waits"),
    ("checkpoint", "every N steps: owners write runs", "in the background if asked to"),
]


def architecture() -> str:
    """The packages in import order, and a step's way through them."""
    if list(PHRASES) != ORDER:
        raise ValueError("architecture: PHRASES must name the packages of tests/test_package.py ORDER, in its order")
    row, used = 27, {name for name, *_ in STEP}
    c = Canvas("The packages of ndtrain in import order, and what a training step does in them")
    y = c.heading(12, "Packages: each imports only from those above it")
    for name in ORDER:
        c.rect(LEFT, y, ROOM, row - 4, LIGHT[SKY] if name in used else PALE)
        c.text(LEFT + 8, y + 16, name, 13, 92, bold=True)
        c.text(LEFT + 104, y + 16, PHRASES[name], 13, ROOM - 108)
        y += row
    c.note("Blue: named below. mesh serves them all.")
    _step_rows(c, c.heading(c.foot + 16, "A training step, on every rank"))
    return c.svg()


def _step_rows(c: Canvas, y: float) -> None:
    pitch, h, left = 58, 46, LEFT + 24
    for i, (package, what, how) in enumerate(STEP):
        top = y + i * pitch
        c.rect(left, top, WIDTH - LEFT - left, h, WHITE, BLUE)
        c.box(left, top, 98, h, [package], LIGHT[SKY], line=BLUE)
        c.text(left + 108, top + 19, what, 13, WIDTH - LEFT - left - 110)
        c.text(left + 108, top + 37, how, 13, WIDTH - LEFT - left - 110, fill=GREY)
        if i + 1 < len(STEP):
            c.arrow((left + 200, top + h), (left + 200, top + pitch - 1))
    first, last = y + 2 * pitch + h / 2, y + 5 * pitch + h / 2
    c.arrow((left, last), (left - 16, last), (left - 16, first), (left - 1, first))


# ------------------------------------------------------------------------------------------------------- layout, fsdp


def layout_runs() -> str:
    """Two matrices over tp=2 and fsdp=2: which element is whose, and the runs that say so."""
    c = Canvas("How two matrices are sharded over tp=2 and fsdp=2, and the runs of each rank")
    mesh = MeshSpec(AXES, (1, 1, 2, 1, 2))
    dims = {"heads": Dim("heads", 2, 2), "embed": Dim("embed", 8)}
    tensors = {"q_proj.weight": ("heads", "embed"), "o_proj.weight": ("embed", "heads")}
    c.heading(12, "dims, rules {heads: tp} and a rank's coords give its runs (global_start, local_start, length)")
    for name, names in tensors.items():
        table = {name: tuple(dims[d] for d in names)}
        ranks = [Layouts(table, {"heads": "tp"}, mesh, rank)[name] for rank in range(mesh.world_size)]
        _runs_panel(c, c.foot + 28, ranks, mesh, dims)
    c.note(
        "tp takes whole heads. What a tp rank has left is one row of elements, which fsdp cuts evenly. A run is "
        "contiguous in both."
    )
    return c.svg()


def _runs_panel(c: Canvas, y: float, ranks: Sequence[TensorLayout], mesh: MeshSpec, dims: dict[str, Dim]) -> None:
    t, x = ranks[0], LEFT
    rows, columns = t.shape
    role = "column: its outputs are sharded" if t.shard_dim == 0 else "row: its inputs are sharded"
    c.text(x, y, f"{t.name}  [{t.dims[0].name}, {t.dims[1].name}] = [{rows}, {columns}]", 13, ROOM, bold=True)
    c.text(x, y + 19, f"heads = {dims['heads'].units} x head_dim {dims['heads'].width}; {role}", 13, ROOM, fill=GREY)
    flats = [FlatLayout.of([layout], UnitGroups(shards=mesh.size("fsdp"))) for layout in ranks]
    runs = [f.runs(*f.bounds(mesh.coords(r)["fsdp"]))[0][1] for r, f in enumerate(flats)]
    owner = {run.global_start + k: r for r, of_rank in enumerate(runs) for run in of_rank for k in range(run.length)}
    cell, top = 28, y + 32
    for at, rank in owner.items():
        row, column = divmod(at, columns)
        c.box(x + column * cell, top + row * cell, cell, cell, [str(at)], RANKS[rank], size=12, line=WHITE)
    c.text(x + columns * cell + 12, top + 14, "number: offset in the", 13, fill=GREY)
    c.text(x + columns * cell + 12, top + 32, "row-major tensor", 13, fill=GREY)
    for rank, of_rank in enumerate(runs):
        _runs_row(c, x, top + rows * cell + 10 + rank * 32, mesh.where(rank), RANKS[rank], of_rank)


def _runs_row(c: Canvas, x: float, y: float, where: str, colour: str, runs: Sequence[Run]) -> None:
    c.box(x, y, 108, 26, [where], colour)
    words = " ".join(f"({r.global_start},{r.local_start},{r.length})" for r in runs)
    c.text(x + 116, y + 17, words, 13, ROOM - 116, mono=True)


def flat_fsdp() -> str:
    """The flat buffer of one block, and what happens to it in a step."""
    c = Canvas("The flat buffer of one block, cut over four ranks of fsdp x cp")
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
        [layouts[n] for n, p in params(m).items() if p.unit == layer(0)],
        layouts.groups(f"{layer(0)}.input_layernorm.weight"),
    )
    c.heading(12, "One unit (a block): its parameters are views of one flat buffer")
    c.note(
        f"Blue: {flat.matrix_numel} elements of matrices, with weight decay. Orange: the vectors of two norms. "
        "Grey: padding."
    )
    half = flat.numel // 2
    for row in range(2):
        _flat_row(c, c.foot + 14, flat, row * half, (row + 1) * half)
    _unit_life(c, c.heading(c.foot + 16, "When three units are gathered, computed and reduced, with mesh.zero=3"))
    return c.svg()


def _flat_row(c: Canvas, y: float, flat: FlatLayout, start: int, stop: int) -> None:
    """The elements from start to stop: whose parameters they are, and below it which rank's shard."""
    scale, h = ROOM / (stop - start), 32
    c.rect(LEFT, y, ROOM, h, GREY, INK, 0)
    for t, first, last in flat.tensors_in(0, flat.numel):
        left, right = max(first, start), min(last, stop)
        if left >= right:
            continue
        x, w, matrix = LEFT + (left - start) * scale, (right - left) * scale, len(t.dims) > 1
        c.rect(x, y, w, h, LIGHT[SKY] if matrix else LIGHT[ORANGE], INK, 0)
        if matrix and start <= (first + last) / 2 < stop:
            c.text(x + w / 2, y + 20, t.name.split(".")[-2].removesuffix("_proj"), 13, w, "middle")
    for part in range(flat.groups.shards):
        first, last = flat.bounds(part)
        if start <= first < stop:
            words = [f"rank {part}: elements {first} to {last - 1}"]
            c.box(LEFT + (first - start) * scale, y + h + 4, (last - first) * scale, 28, words, RANKS[part])


LANES = ("all-gather", "compute", "reduce-scatter")


def _unit_life(c: Canvas, y: float) -> None:
    """When three units are gathered, computed and reduced in one microbatch, as `expand` orders it for zero=3."""
    run: Callable = lambda x, ctx: x
    layers = line_up({0: [Segment((str(i),), run) for i in range(3)]}, last_stage=1)
    actions = expand([Action("F", 0, 0), Action("B", 0, 0)], layers, [], ahead=1)
    slots, w, h = [ins for action in actions for ins in action], ROOM / 3, 32
    for i, lane in enumerate(LANES):
        c.text(LEFT + (i + 0.5) * w, y + 12, lane, 13, w, "middle", GREY)
        c.rect(LEFT + i * w + 3, y + 20, w - 6, (len(slots) + 2) * h, PALE, PALE)
    cell = lambda slot, lane, text, fill: c.box(
        LEFT + lane * w + 6, y + 22 + slot * h, w - 12, h - 4, [text], LIGHT[fill]
    )
    here = set(slots[0].weights)
    cell(0, 0, f"unit {slots[0].weights[0]}", GREEN)
    for slot, ins in enumerate(slots, 1):
        unit = layers[ins.run.layer].units[0]
        cell(slot, 1, f"{'forward' if ins.run.kind == 'F' else 'backward'} {unit}", BLUE)
        for name in set(ins.prefetch) - here:
            cell(slot, 0, f"unit {name}", GREEN)
        here |= set(ins.prefetch)
        here -= set(ins.weights) if ins.reshard else set()
        for name, _ in ins.reduce:
            cell(slot + 1, 2, f"unit {name}", VERMILION)
    c.note(
        "Time runs downwards. Unit 1 is prefetched while unit 0 computes. After its forward unit 0 is resharded: its "
        "buffer is freed. Unit 2 is read next by its own backward, so it stays."
    )
    c.note(
        "Gradients are written into a flat buffer of their own, which is reduce-scattered while the next backward "
        "runs. A rank adds the sum for its shard to its gradient."
    )
    c.note(
        "zero=2 keeps the gathered parameters. zero=1 also keeps the whole gradient, and reduce-scatters once a step. "
        "The optimizer updates the shard in two slices a unit: matrices, which decay, and vectors, which do not."
    )


# ----------------------------------------------------------------------------------------------------------- tp and cp


def tp_column_row() -> str:
    """Attention and MLP of a block over tp=2 with sequence parallelism: who holds what, and what is sent."""
    c = Canvas("Column and row parallel matmuls of a block over tp=2, with sequence parallelism")
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
    c.heading(12, "tp=2 with sequence parallelism: half of every matrix on each rank")
    halves = (
        ("attention", "q, k, v proj", shard["self_attn.q_proj"], "attention", "o_proj", shard["self_attn.o_proj"]),
        ("MLP", "gate, up proj", shard["mlp.gate_proj"], "SwiGLU", "down_proj", shard["mlp.down_proj"]),
    )
    for half in halves:
        _tp_half(c, c.foot + 14, *half)
    c.note("Column: a rank holds a share of the outputs (rows of the weight [out, in]) and sees all tokens.")
    c.note(
        "Row: a rank holds a share of the inputs (columns of the weight). Its outputs are partial sums of all ranks."
    )
    return c.svg()


def _tp_half(
    c: Canvas, y: float, name: str, first: str, first_dim: int, core: str, second: str, second_dim: int
) -> None:
    """A half of the block, from top to bottom, with a column for each rank."""
    c.text(LEFT, y + 16, f"{name}: {first} and {second}", 13, bold=True)
    w, gap, core_word = (ROOM - 12) / 2, 14, f"{core} on its own {'heads' if core == 'attention' else 'part'}"
    tops = [y + 28]
    for height in (46, 28, 62, 28, 62, 28):  # of all but the last
        tops.append(tops[-1] + height + gap)
    for i, words in ((1, "all-gather: all tokens"), (5, "reduce-scatter")):
        c.box(LEFT, tops[i], ROOM, 28, [words], LIGHT[GREEN], line=GREEN)
    for rank in range(2):
        x, colour = LEFT + rank * (w + 12), RANKS[rank]
        c.box(x, tops[0], w, 46, [f"rank tp={rank}: norm of", "its share of the tokens"], LIGHT[colour])
        _matrix(c, x + 26, tops[2], first, first_dim, rank)
        c.box(x, tops[3], w, 28, [core_word], LIGHT[colour])
        _matrix(c, x + 26, tops[4], second, second_dim, rank)
        c.box(x, tops[6], w, 28, ["its share of the tokens"], LIGHT[colour])
        for top in tops[1:]:
            c.arrow((x + 57, top - gap + 1), (x + 57, top - 1))


def _matrix(c: Canvas, x: float, y: float, name: str, dim: int | None, rank: int) -> None:
    """A weight [out, in] with the part that a rank holds in its colour."""
    side = 62
    c.rect(x, y, side, side, WHITE, RULE, 0)
    w, h = (side, side / 2) if dim == 0 else (side / 2, side)
    c.rect(x + (rank * w if dim == 1 else 0), y + (rank * h if dim == 0 else 0), w, h, RANKS[rank], INK, 0)
    role = {0: "column", 1: "row", None: "replicated"}[dim]
    c.text(x + side + 8, y + 27, name, 13, 100)
    c.text(x + side + 8, y + 45, role, 13, 100, fill=GREY)


def ring_zigzag() -> str:
    """How a sequence is dealt to four ranks, and what each computes in each step of the ring."""
    c = Canvas("Sequence sharding over cp=4, and the steps of ring attention")
    length, ring, left = 16, 4, 72
    y = c.heading(12, "A sequence of 16 tokens over a ring of 4: which rank holds which token")
    cell, w = (WIDTH - LEFT - left) / length, (WIDTH - LEFT - left) / ring
    for balance in ("zigzag", "striped", "none"):
        sharding = SequenceSharding(length, ring=ring, balance=balance)
        c.text(LEFT, y + 19, balance, 13, bold=True)
        c.text(LEFT, y + 49, "scores", 13, fill=GREY)
        for rank in range(ring):
            for t in sharding.index(rank):
                c.box(left + int(t) * cell, y, cell, 28, [str(t)], RANKS[rank], size=12, line=WHITE)
            work = sum(int(t) + 1 for t in sharding.index(rank))
            c.box(left + rank * w, y + 32, w, 24, [f"rank {rank}: {work}"], RANKS[rank], line=WHITE)
        y += 70
    c.note("Scores: the pairs of query and key that a rank computes under the causal mask.")
    y = c.heading(c.foot + 16, "Ring attention with zigzag: whose keys and values a rank has in each step")
    _ring_steps(c, SequenceSharding(length, ring=ring, balance="zigzag"), y)
    c.note(
        "Queries stay. Keys and values move one rank on after each step; the next ones travel while a step computes. "
        "The results of the steps are merged by their log-sum-exp. Pairs that the mask hides are not computed."
    )
    return c.svg()


def _ring_steps(c: Canvas, sharding: SequenceSharding, y: float) -> None:
    """A column for each rank, a row for each step."""
    ring, left, pitch, h = sharding.ring, 64, 78, 60
    w = (WIDTH - LEFT - left) / ring
    for rank in range(ring):
        x = left + rank * w
        c.box(x, y, w - 6, h, [f"rank {rank}", "queries", _spans(sharding, rank)], LIGHT[RANKS[rank]])
        for step in range(ring):
            holder, top = (rank - step) % ring, y + 70 + step * pitch
            queries, keys = sharding.index(rank), sharding.index(holder)
            seen = int((queries[:, None] >= keys[None, :]).sum())
            c.box(x, top, w - 6, h, ["keys", _spans(sharding, holder), f"{seen} scores"], RANKS[holder])
            if step + 1 < ring and rank + 1 < ring:
                c.arrow((x + w / 2 + 20, top + h + 1), (x + 1.5 * w - 26, top + pitch - 1))
    for step in range(ring):
        c.text(LEFT, y + 70 + step * pitch + 34, f"step {step}", 13, fill=GREY)


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
    scale = (ROOM - 14) / max(t.makespan for t in timelines.values())
    c = Canvas("All pipeline schedules over four ranks and eight microbatches")
    _schedule_legend(c)
    for name, timeline in timelines.items():
        _timeline_rows(c, panel(timeline, name).title, timeline.spans, scale)
    return c.svg()


def timeline_measured() -> str:
    """A step of llama_small over two stages as it ran, and what the simulator predicts from its mean times."""
    measured = json.loads((ROOT / "benchmarks" / "timeline-zb_h1-cpu-2.json").read_text())
    c = Canvas("A step of llama_small over two stages, measured and predicted")
    _kinds_legend(c, c.heading(12, "A step of llama_small over two stages"), "FIW")
    panels = {
        of["title"]: [[Span(Action(kind, m, stage), *at) for kind, m, stage, *at in row] for row in of["rows"]]
        for of in measured["panels"]
    }
    scale = (ROOM - 14) / max(s.end for rows in panels.values() for row in rows for s in row)
    for title, rows in panels.items():
        _timeline_rows(c, title, rows, scale)
    c.note("A row for each rank, both on one time scale. Numbers: microbatches. The last stage holds head and loss.")
    return c.svg()


def _timeline_rows(c: Canvas, title: str, rows: Sequence[Sequence[Span]], scale: float) -> None:
    """A timeline below everything that is drawn so far, with a row for each rank."""
    name, _, facts = title.partition(": ")
    y, row, left = c.foot + 34, 24, LEFT + 14
    c.text(LEFT, y, name, 13, bold=True)
    c.text(LEFT, y + 18, facts, 12, ROOM, fill=GREY)
    length = max(s.end for spans in rows for s in spans)
    for rank, spans in enumerate(rows):
        top, chunks = y + 26 + rank * row, sorted({s.action.stage for s in spans})
        c.text(LEFT, top + 16, str(rank), 12, fill=GREY)
        c.rect(left, top, scale * length, row - 3, PALE, PALE, 0)
        for s in spans:
            _action(c, left + s.start * scale, top, (s.end - s.start) * scale, row - 3, s.action, chunks)


def _shares(s: Schedule) -> dict[str, float]:
    """Costs of one microbatch on a rank's stages together, the same in all schedules."""
    chunks = s.stages / s.pp
    return {"F": 1 / chunks, "I": 1 / chunks, "W": 1 / chunks, "B": 2 / chunks}


def _action(c: Canvas, x: float, y: float, w: float, h: float, action, chunks: Sequence[int]) -> None:
    c.rect(x, y, w, h, KINDS[action.kind], WHITE, 0)
    if w >= 6.5:
        c.text(x + w / 2, y + 14, str(action.microbatch), 12, None, "middle", ink_on(KINDS[action.kind]))
    if len(chunks) > 1 and action.stage == chunks[-1]:
        c.rect(x + 1, y + h - 4, w - 2, 3.5, INK, INK, 0)


def _schedule_legend(c: Canvas) -> None:
    y = c.heading(12, "Schedules over pp=4 with 8 microbatches (forward 1, input gradient 1, weight gradient 1)")
    _kinds_legend(c, y, "FBIW")
    c.rect(LEFT, y + 52, 24, 20, PALE, RULE, 0)
    c.rect(LEFT + 1, y + 67.5, 22, 3.5, INK, INK, 0)
    c.text(LEFT + 32, y + 67, "the rank's second chunk", 13)
    c.note("A row for each rank. Numbers: microbatches, if they fit.")


def _kinds_legend(c: Canvas, y: float, kinds: str) -> None:
    for i, kind in enumerate(kinds):
        x, top = LEFT + ROOM / 2 * (i % 2), y + 26 * (i // 2)
        c.box(x, top, 24, 20, [kind], KINDS[kind])
        c.text(x + 32, top + 15, LEGEND[kind], 13)


def step_instructions() -> str:
    """The instructions of the last rank of a pipeline for one forward and one backward action."""
    c = Canvas("How the actions of a step become instructions")
    schedule = build("1f1b", 2, 2)
    row = schedule.table[1]
    layers = _last_stage([2, 3])
    groups = plan_recompute([0, 1], RecomputeConfig(name="full"), RecomputeOps())
    actions = expand(row, layers, groups, ahead=1)
    y = c.heading(12, "1f1b, pp=2, 2 microbatches, recompute=full, zero=3: the last rank's row")
    for i, a in enumerate(row):
        words = [f"{i + 1}. {a.kind}: {LEGEND[a.kind]} of microbatch {a.microbatch}"]
        c.box(LEFT, y + 30 * i, ROOM, 26, words, KINDS[a.kind])
    y = c.heading(c.foot + 12, "The instructions of actions 1 and 2")
    for name, (x, room) in COLUMNS.items():
        c.text(x, y + 12, name, 13, room, fill=GREY)
    y += 22
    for number in (0, 1):
        y = _action_rows(c, y, row[number].kind, actions[number], layers)
    c.note(
        "The list is made once. Head and loss run forward inside the backward action. A block that is recomputed runs "
        "without a graph first, and with one in its backward. What the next one reads too is not resharded. The last "
        "column is reduce-scattered."
    )
    return c.svg()


COLUMNS = {"unshard": (184, 72), "prefetch": (256, 72), "reshard": (328, 58), "reduce": (386, 66)}  # -> place, room


def _last_stage(blocks: Sequence[int]) -> list[Layer]:
    run: Callable = lambda x, ctx: x
    segments = [Segment((layer(i),), run) for i in blocks] + [Segment(("model.norm",), run), Segment(("lm_head",), run)]
    return line_up({1: segments}, last_stage=1)


def _action_rows(c: Canvas, y: float, kind: str, instructions: Sequence[Instruction], layers: Sequence[Layer]) -> float:
    h = 40
    c.box(LEFT, y, 24, h * len(instructions) - 4, [kind], KINDS[kind], size=14)
    for ins in instructions:
        what, *words = _instruction_words(ins, layers)
        c.rect(LEFT + 28, y, ROOM - 28, h - 4, PALE, PALE)
        c.box(LEFT + 28, y, 134, h - 4, what, LIGHT[BLUE] if ins.run.kind == "F" else LIGHT[VERMILION])
        for text, (x, room) in zip(words, COLUMNS.values(), strict=True):
            c.text(x, y + 22, text, 13, room)
        y += h
    return y + 8


def _instruction_words(ins: Instruction, layers: Sequence[Layer]) -> tuple[list[str], str, str, str, str]:
    short = lambda unit: unit.removeprefix("model.")
    unit = short(layers[ins.run.layer].units[0])
    kind = "recompute" if ins.run.recompute else {"F": "forward", "B": "backward"}[ins.run.kind]
    what = [f"{kind} {unit}", *["no graph"] * (ins.run.kind == "F" and not ins.run.keep_graph)]
    names = lambda units: ", ".join(map(short, units))
    reduce = names(unit for unit, _ in ins.reduce)
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
    c = Canvas("A mesh of pp=2 fsdp=2 tp=2 over eight ranks, and what each axis shards and sends")
    spec = MeshSpec(AXES, (2, 1, 2, 1, 2))
    y = c.heading(12, "mesh.pp=2 mesh.fsdp=2 mesh.tp=2: eight ranks, the last axis innermost")
    w = (ROOM - 12) / 2
    for pp in range(2):
        _mesh_stage(c, LEFT + pp * (w + 12), y, w, spec, pp)
    y = c.heading(c.foot + 12, "Groups: ranks that differ in one coordinate only")
    for axis in ("tp", "fsdp", "pp"):
        c.box(LEFT, y, 60, 30, [axis], LIGHT[AXIS_WORDS[axis][2]])
        c.text(LEFT + 72, y + 20, "  ".join(f"({' '.join(map(str, g))})" for g in spec.groups(axis)), 13, ROOM - 72)
        y += 36
    y = c.heading(c.foot + 12, "What an axis shards, and what it sends")
    for axis in (*AXES, EP):
        shards, sends, colour = AXIS_WORDS[axis]
        c.rect(LEFT, y, ROOM, 48, PALE, PALE)
        c.box(LEFT, y, 52, 48, [axis], LIGHT.get(colour, WHITE))
        c.text(LEFT + 62, y + 20, shards, 13, ROOM - 62)
        c.text(LEFT + 62, y + 38, sends, 13, ROOM - 62, fill=GREY)
        y += 54
    return c.svg()


def _mesh_stage(c: Canvas, x: float, y: float, w: float, spec: MeshSpec, pp: int) -> None:
    c.rect(x, y, w, 258, LIGHT[PURPLE], PURPLE, 8)
    c.text(x + 10, y + 20, f"pp={pp}", 13, bold=True)
    for fsdp in range(2):
        top = y + 30 + 112 * fsdp
        c.rect(x + 8, top, w - 16, 104, LIGHT[GREEN], GREEN, 8)
        c.text(x + 16, top + 20, f"fsdp={fsdp}", 13, bold=True)
        for tp in range(2):
            rank, each = spec.rank({"pp": pp, "dp": 0, "fsdp": fsdp, "cp": 0, "tp": tp}), (w - 40) / 2
            words = [f"rank {rank}", f"tp={tp}"]
            c.box(x + 16 + (each + 8) * tp, top + 32, each, 60, words, LIGHT[BLUE], line=BLUE)


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


def diloco_loss() -> str:
    """The validation loss of data parallelism, and of each number of islands with its best learning rates."""
    cases = json.loads((ROOT / "benchmarks" / "islands-diloco.json").read_text())["cases"]
    plain = [case for case in cases if case["codec"] == "fp32"]
    runs = []
    for n in sorted({case["islands"] for case in plain}):
        best = min((case for case in plain if case["islands"] == n), key=lambda case: case["loss"])
        name = f"{n} island{'s' * (n > 1)}" if n else "data parallelism"
        steps, losses = np.array(best["curve"]).T
        runs.append(LoggedRun(name, Path(), steps, {"loss": losses}, 0, [], [], {}, ""))
    return render_svg(runs)


DRAWINGS = [
    Drawing(f.__name__ + ".svg", f)
    for f in (
        architecture,
        layout_runs,
        flat_fsdp,
        tp_column_row,
        ring_zigzag,
        pipeline_schedules,
        timeline_measured,
        step_instructions,
        mesh,
        loss_curve,
        moe_loss_curve,
        diloco_loss,
    )
]


if __name__ == "__main__":
    sys.exit(update(((DOCS / "img" / name, draw()) for name, draw in DRAWINGS), "drawings.py", sys.argv[1:]))
