"""The results of `bench gpu` as markdown tables: the goals, and every case of the suite, measured or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.gpu.goals import Goal, Rows, goals, measured
from lab.gpu.suite import Case, Suite

GIB = 2**30
NOT_MEASURED = "not measured"


def markdown(name: str, suite: Suite, results: Mapping[str, Any]) -> str:
    """Return the whole report.

    Args:
        name: the suite's name.
        results: `surroundings()`, and the rows so far under "cases".
    """
    rows = results["cases"]
    aims = goals(suite.large, suite.paired)
    parts = [f"# bench gpu suite={name}, for {suite.device}", "\n".join(_origin(results))]
    parts += ["## Goals", _goals(aims, rows), *_behind(aims, rows)]
    for kind, (title, head, cells) in TABLES.items():
        lines = [[_name(case), *_cells(rows.get(case.name), cells, len(head))] for case in of_kind(suite, kind)]
        parts += [f"## {title}", table(["case", *head], lines), *_reasons(suite, kind, rows)] if lines else []
    missing = sum(case.name not in rows for case in suite.cases)
    if missing:
        parts.append(
            f"{missing} of {len(suite.cases)} cases are not measured. On a machine with the GPU, `python -m "
            f"ndtrain.bench gpu suite={name} missing=true` measures them, most decisive cases first."
        )
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table whose columns are also aligned as text."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in lines)


def of_kind(suite: Suite, kind: str) -> list[Case]:
    """Return the cases of one of `TABLES`."""
    return [case for case in suite.cases if _table_of(case) == kind]


def _table_of(case: Case) -> str:
    return "against" if len(case.implementations) > 1 else case.kind


def _name(case: Case) -> str:
    """Return the case's name with the size of a step: sequences per microbatch x tokens (x microbatches)."""
    given = dict(o.split("=", 1) for o in case.overrides)
    micro, step = (int(given[f"train.{key}_batch"]) for key in ("micro", "global"))
    again = f" x {step // micro}" if step > micro else ""
    return f"{case.name} ({micro} x {given['train.seq_len']}{again})"


def _cells(row: Mapping[str, Any] | None, cells: Callable[[Mapping], list[str]], count: int) -> list[str]:
    if row is None:
        return [NOT_MEASURED] * count
    if row["status"] != "measured":
        return [row["status"], *[""] * (count - 1)]
    return cells(row)


def _reasons(suite: Suite, kind: str, rows: Rows) -> list[str]:
    """Return a paragraph with a line for each case that has no figures, and the reason."""
    without = [(c.name, rows[c.name]) for c in of_kind(suite, kind) if rows.get(c.name, {}).get("why")]
    lines = [f"- {name}: {row['status']}: {row['why']}" for name, row in without]
    return ["\n".join(lines)] if lines else []


def _origin(results: Mapping[str, Any]) -> list[str]:
    hardware, commits = results["hardware"], {row["commit"] for row in results["cases"].values()}
    return [
        f"- GPU: {'; '.join(hardware['gpus']) or NOT_MEASURED}",
        f"- CPU: {hardware['cpu']}, {hardware['cores']} cores",
        f"- versions: {', '.join(f'{k} {v}' for k, v in results['versions'].items())}",
        f"- commit: {', '.join(sorted(map(str, commits))) or results['commit']}",
        "- cases: sequences of a microbatch x tokens (x microbatches); MFU: (6 N_matmul + 12 L H Q T) a token, "
        "attention not halved, against the dense bf16 peak",
    ]


def _goals(aims: Sequence[Goal], rows: Rows) -> str:
    aim = lambda g: f"{'at most' if g.at_most else 'at least'} {g.shown.format(g.bound)}"
    return table(["goal", "aim", "measured", ""], [[g.text, aim(g), *g.outcome(rows)] for g in aims])


def _behind(aims: Sequence[Goal], rows: Rows) -> list[str]:
    """Return the profile of the step for each goal that is behind."""
    names = dict.fromkeys(g.profile for g in aims if g.profile and g.outcome(rows)[1] == "behind")
    parts = []
    for name in names:
        lines = rows[name]["lines"] if measured(rows, name) else [NOT_MEASURED]
        parts += [f"Behind: where the time of a step goes, {name}", "\n".join(["```text", *lines, "```"])]
    return parts


# ---------------------------------------------------------------------------------------------- one kind of row each


def _timed(row: Mapping[str, Any]) -> list[str]:
    (own,) = row["sides"].values()
    share = lambda x: "" if x is None else f"{x:.1%}"
    size = lambda x: "" if x is None else f"{x / GIB:.2f}"
    return [
        f"{own['ms_per_step']:.1f} ({own['q1']:.1f} to {own['q3']:.1f})",
        f"{own['tokens_per_s']:,.0f}",
        share(own["mfu"]),
        share(own["hfu"]),
        size(row["peak_memory_bytes"]),
        size(own["state_bytes"]),
    ]


def _against(row: Mapping[str, Any]) -> list[str]:
    ((peer, ratio),) = row["ratios"].items()
    own, other = row["sides"]["ours"], row["sides"][peer]
    return [
        f"{own['tokens_per_s']:,.0f}",
        f"{other['tokens_per_s']:,.0f}",
        f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})",
        f"{own['losses'][-1]:.4f} / {other['losses'][-1]:.4f}",
    ]


def _losses(row: Mapping[str, Any]) -> list[str]:
    losses = row["losses"]
    return [str(len(losses)), f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]


def _longest(row: Mapping[str, Any]) -> list[str]:
    tokens, peaks = row["tokens"], {int(length): peak for length, peak in row["peaks"].items()}
    more = " or more" if tokens >= row["searched_to"] else ""
    return [f"{tokens:,}{more}", f"{peaks[tokens] / GIB:.2f}" if tokens else ""]


def _syncs(row: Mapping[str, Any]) -> list[str]:
    waits = row["waits"]
    return [f"{sum(waits.values()) / row['steps']:g}", ", ".join(f"{n} x {name}" for name, n in waits.items())]


def _parity(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['loss']:.1e}", f"{row['gradient']:.1e}", row["tensor"]]


def _profile(row: Mapping[str, Any]) -> list[str]:
    kinds = row["table"]["kinds"]
    most = list(kinds.items())[:4]
    shares = ", ".join(f"{kind} {spent['ms'] / row['table']['step_ms']:.0%}" for kind, spent in most)
    return [f"{row['table']['step_ms']:.1f}", f"{row['table']['kernel_share']:.1%}", shares]


TABLES = {
    "parity": ("The same steps as on the CPU", ["loss off", "a gradient off", "in"], _parity),
    "timed": (
        "Steps",
        ["ms/step (quartiles)", "tokens/s", "MFU", "HFU", "peak GiB", "state GiB"],
        _timed,
    ),
    "against": (
        "Against others, in alternating rounds: their time over ours",
        ["our tokens/s", "their tokens/s", "ratio (quartiles)", "last loss, ours / theirs"],
        _against,
    ),
    "losses": ("Losses", ["steps", "first", "last"], _losses),
    "longest": ("The longest sequence that fits", ["tokens", "peak GiB"], _longest),
    "profile": ("Where a step's time goes", ["ms/step, profiled", "in kernels", "most of it"], _profile),
    "syncs": ("What the host waits for in steady steps", ["a step", "in all"], _syncs),
}
