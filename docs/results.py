"""Writes docs/results.md: the figures of the files in benchmarks/, as tables in the text of docs/results_text.md.

python docs/results.py           # writes the page
python docs/results.py --check   # exit status 1, and one line, if the page is stale
"""

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from written import update

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
TEXT = ROOT / "docs" / "results_text.md"
PAGE = ROOT / "docs" / "results.md"
GENERATED = (
    "<!-- Written by docs/results.py from benchmarks/ and docs/results_text.md. Change those, not this page. -->\n\n"
)
PLACE = re.compile(r"^<!-- table: (\w+) -->$", flags=re.MULTILINE)
GIB = 2**30

PEERS = {
    "bare": "a bare loop over the same model",
    "transformers": "`transformers` Llama, same shape",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2, zero=3",
    "dtensor_tp": "DTensor",
    "dtensor_tp_sp": "DTensor, sequence parallel",
    "torch_allgather": "all-gather",
    "torch_alltoall": "all-to-all",
}
GPU_CASES = {
    "8b 8192": "Llama 3 8B, bf16, bf16 moments",
    "8b 8192 fp8": "Llama 3 8B, fp8, bf16 moments",
    "8b 8192 full, native": "plain PyTorch (FSDP2), 8B, full recompute, without which it does not fit",
    "a3b12 4096": "Qwen3 30B-A3B's widths, 12 of 48 layers, bf16",
    "8b8 8192 against native": "plain PyTorch (FSDP2), 8B's widths, 8 of 32 layers",
    "1b 8192 against native": "plain PyTorch (FSDP2), Llama 3.2 1B",
    "a3b4 4096 eager against transformers": "`transformers`, 30B-A3B's widths, 4 of 48 layers, both eager",
    "8b 8192 profile": "8B, 2 x 8,192 tokens",
    "1b 8192 profile": "1B, 4 x 8,192 tokens",
}
LOSS_WINDOWS = (51, 151, 251, 351)  # first steps of windows of 50


def load(name: str) -> dict[str, Any]:
    """Return the results in benchmarks/<name>.json."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def load_run(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run folder's about.json and the rows of its metrics.jsonl."""
    rows = (BENCHMARKS / name / "metrics.jsonl").read_text().splitlines()
    return json.loads((BENCHMARKS / name / "about.json").read_text()), [json.loads(row) for row in rows]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread(ratio: Mapping[str, float]) -> str:
    """Return a median with its quartiles."""
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def size_text(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


def short(commit: str) -> str:
    """Return the first digits of a commit, and whether the checkout had changes that were not committed."""
    digits, _, dirty = commit.partition("-")
    return digits[:9] + (" with uncommitted changes" if dirty else "")


def origin(*names: str) -> str:
    """Return where these results come from: a line for each hardware and commit, with its files."""
    groups: dict[str, list[str]] = {}
    for name in names:
        results = load(name)
        hardware, versions = results["hardware"], results["versions"]
        device = "".join(f"{gpu}; " for gpu in hardware.get("gpus", ()))
        commits = dict.fromkeys(case["commit"] for case in gpu_cases(results)) if results["bench"] == "gpu" else ()
        key = (
            f"{device}{hardware['cores']} cores of {hardware['cpu']}; torch {versions['torch']}, transformers "
            f"{versions['transformers']}; commit {', '.join(map(short, commits or [results['commit']]))}"
        )
        groups.setdefault(key, []).append(f"`{name}.json`")
    return "\n".join(f"- {key}: {', '.join(files)}" for key, files in groups.items())


def with_origin(text: str, *names: str) -> str:
    return f"{text}\n\n{origin(*names)}"


# ------------------------------------------------------------------------------------------------------ one H200


def gpu_cases(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the measured cases with their names, in the order of `GPU_CASES` and then of the file."""
    cases = results["cases"]
    names = [name for name in GPU_CASES if name in cases] + [name for name in cases if name not in GPU_CASES]
    cases = [{"name": GPU_CASES.get(name, name)} | cases[name] for name in names]
    return [case for case in cases if case["status"] == "measured"]


def gpu_steps() -> str:
    """Return the timed cases of one implementation."""
    rows = []
    for case in gpu_cases(load("gpu-h200")):
        if case["kind"] == "timed" and len(case["sides"]) == 1:
            (own,) = case["sides"].values()
            rows.append([
                case["name"], step_tokens(case), f"{own['ms_per_step']:,.0f} ({own['q1']:,.0f} to {own['q3']:,.0f})",
                f"{own['tokens_per_s']:,.0f}", percent(own["mfu"]), f"{case['peak_memory_bytes'] / GIB:.1f}",
            ])  # fmt: skip
    head = ["case", "a step", "ms a step (quartiles)", "tokens/s", "MFU", "peak GiB"]
    return with_origin(table(head, rows), "gpu-h200")


def step_tokens(case: Mapping[str, Any]) -> str:
    length = case["config"]["train"]["seq_len"]
    return f"{case['tokens_per_step'] // length} x {length:,} tokens"


def gpu_peers() -> str:
    """Return the cases that alternate with a peer."""
    rows = []
    for case in gpu_cases(load("gpu-h200")):
        for peer, ratio in case.get("ratios", {}).items():
            own, other = case["sides"]["ours"], case["sides"][peer]
            rows.append([
                case["name"], step_tokens(case), f"{own['tokens_per_s']:,.0f}",
                f"{other['tokens_per_s']:,.0f}",
                f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})",
            ])  # fmt: skip
    return table(["peer and model", "a step", "our tokens/s", "its tokens/s", "its time / ours (quartiles)"], rows)


def gpu_aims() -> str:
    """Return the measured aims of the suite, and the number of aims and cases that are not measured."""
    sys.path.insert(0, str(ROOT))
    goals = importlib.import_module("lab.gpu.goals").goals()
    suite = importlib.import_module("lab.gpu.suite").SUITES["h200"]
    cases = load("gpu-h200")["cases"]
    rows = []
    for goal in goals:
        figure, verdict = goal.outcome(cases)
        if verdict != "not measured":
            bound = f"{'at most' if goal.at_most else 'at least'} {goal.shown.format(goal.bound)}"
            rows.append([goal.text, bound, figure, verdict])
    return (
        table(["figure", "aim", "measured", ""], rows)
        + f"\n\n{len(goals) - len(rows)} of the {len(goals)} aims and {len(suite.cases) - len(cases)} of the suite's "
        f"{len(suite.cases)} cases are not measured."
    )


def profile_table(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the milliseconds of a step by kind of work, a column for each profile."""
    kinds = sorted({k for p in profiles.values() for k in p["kinds"]}, key=lambda k: -max_ms(profiles.values(), k))
    rows = [["the step, profiled", *(f"{p['step_ms']:,.0f}" for p in profiles.values())]]
    for kind in kinds:
        spent = [p["kinds"].get(kind, {"ms": 0.0})["ms"] for p in profiles.values()]
        if max(spent) >= 0.05:
            steps = [p["step_ms"] for p in profiles.values()]
            shares = [f"{ms:,.1f} ({percent(ms / step)})" for ms, step in zip(spent, steps, strict=True)]
            rows.append([kind, *(share if ms >= 0.05 else "" for share, ms in zip(shares, spent, strict=True))])
    return table(["ms (share)", *profiles], rows)


def max_ms(profiles: Sequence[Mapping[str, Any]], kind: str) -> float:
    return max(p["kinds"].get(kind, {"ms": 0.0})["ms"] for p in profiles)


def gpu_profile() -> str:
    cases = gpu_cases(load("gpu-h200"))
    return profile_table({case["name"]: case["table"] for case in cases if case["kind"] == "profile"})


# ---------------------------------------------------------------------------------------------------------- peers


def shapes_text(results: Mapping[str, Any]) -> str:
    """Return the two models that a bench of peers trains."""
    texts = {}
    for config in (shape["config"] for shape in results["shapes"].values()):
        model, train = config["model"], config["train"]
        text = f"{model['num_hidden_layers']} layers of hidden size {model['hidden_size']}, microbatches of "
        texts[text + f"{train['micro_batch']} x {train['seq_len']} tokens"] = None
    return "; ".join(texts)


def ratio_rows(names: Sequence[str], shapes: Sequence[str], ours: str = "") -> list[list[str]]:
    """Return a row for each peer and number of ranks, with the ratio at each shape."""
    loaded = [load(name) for name in names]
    peers = dict.fromkeys(peer for results in loaded for s in shapes for peer in results["shapes"][s]["ratios"])
    return [
        [
            *[ours] * bool(ours), PEERS[peer], str(results["ranks"]),
            *(spread(results["shapes"][shape]["ratios"][peer]) for shape in shapes),
        ]
        for peer in peers
        for results in loaded
        if peer in results["shapes"][shapes[0]]["ratios"]
    ]  # fmt: skip


def peers_data() -> str:
    groups = [["peers-cpu-one-1"], ["peers-cpu-dp-2", "peers-cpu-dp-4"], ["peers-cpu-fsdp-2", "peers-cpu-fsdp-4"]]
    rows = [row for names in groups for row in ratio_rows(names, ("compute", "comm"))]
    text = table(["peer", "ranks", "compute-dominated", "communication-dominated"], rows)
    text += f"\n\nThe models: {shapes_text(load(groups[0][0]))}."
    return with_origin(text, *(name for names in groups for name in names))


def peers_tp() -> str:
    forms = {
        "`tp.sequence_parallel=false`": ["peers-cpu-tp-2-whole-stream", "peers-cpu-tp-4-whole-stream"],
        "sequence parallel (default)": ["peers-cpu-tp-2-no-overlap"],
        "`tp.overlap=true`": ["peers-cpu-tp-2", "peers-cpu-tp-4"],
    }
    rows = [row for ours, names in forms.items() for row in ratio_rows(names, ("hidden1024", "hidden256"), ours)]
    text = table(["ours", "peer", "ranks", "hidden size 1024", "hidden size 256"], rows)
    text += f"\n\nThe models: {shapes_text(load('peers-cpu-tp-2'))}."
    return with_origin(text, *(name for names in forms.values() for name in names))


def peers_cp() -> str:
    names = ("peers-cpu-cp-2", "peers-cpu-cp-4")
    text = table(["peer", "ranks", "2,048 tokens", "8,192 tokens"], ratio_rows(names, ("2048", "8192")))
    return with_origin(text, *names)


def peers_cp_link() -> str:
    rows = []
    for name, link in (("peers-cpu-cp-2", "the host's memory"), ("peers-cpu-cp-2-limited-link", "15 MB/s")):
        shape = load(name)["shapes"]["8192"]
        own, silent, exposed = shape["sides"]["ours"], shape["sides"]["silent"], shape["exposed"]
        waits = (own["ms_per_step"], silent["ms_per_step"], exposed["spent_ms"], exposed["lost_ms"])
        rows.append([link, *(f"{ms:,.0f}" for ms in waits)])
    text = table(["link", "a step, ms", "nothing sent, ms", "waits in the step, ms", "slower by, ms"], rows)
    return with_origin(text, "peers-cpu-cp-2", "peers-cpu-cp-2-limited-link")


def peers_pp() -> str:
    names, kinds = ("peers-cpu-pp-2", "peers-cpu-pp-4"), ("pp_compute", "pp_small")
    loaded = [load(name) for name in names]
    rows = []
    for schedule in (shape.split()[1] for shape in loaded[0]["shapes"] if shape.startswith("pp_compute")):
        for results in loaded:
            shapes = [results["shapes"][f"{kind} {schedule}"] for kind in kinds]
            cells = [
                (spread(shape["ratios"]["torch_pipelining"]), f"{shape['sides']['ours']['ms_per_step']:,.0f}")
                for shape in shapes
            ]
            rows.append([f"`{schedule}`", str(results["ranks"]), *(cell for pair in cells for cell in pair)])
    text = table(["schedule", "ranks", "compute-dominated", "ours, ms", "small", "ours, ms"], rows)
    return with_origin(f"{text}\n\nThe models: {shapes_text(loaded[0])}.", *names)


# --------------------------------------------------------------------------------------------------- single parts


def step() -> str:
    rows = []
    results = load("step-cpu-1")["results"]
    for case, row in results.items():
        own = row["sides"]["ours"]
        rows.append([
            f"`{case}`", f"{own['ms_per_step']:.1f} ({own['q1']:.1f} to {own['q3']:.1f})",
            f"{own['tokens_per_s']:,.0f}", percent(own["mfu"]), percent(own["hfu"]),
            f"{row['peak_memory_bytes'] / GIB:.3f}", f"{own['state_bytes'] / GIB:.3f}",
        ])  # fmt: skip
    head = ["", "ms a step (quartiles)", "tokens/s", "MFU", "HFU", "peak GiB", "state GiB"]
    return with_origin(table(head, rows), "step-cpu-1")


def step_profile() -> str:
    return profile_table({f"`{n}`": c["extra"]["table"] for n, c in load("step-cpu-1")["results"].items()})


def checkpoint() -> str:
    names, rows = ("checkpoint-cpu-1", "checkpoint-cpu-4"), []
    for results in map(load, names):
        ratios = results["ratios"]
        stall = ratios["stall / save"]
        seconds = (statistics.median(results["seconds"][kind]) for kind in ("save", "load"))
        rows.append([
            str(results["ranks"]), *(f"{x:.2f}" for x in seconds), spread(ratios["raw write / save"]),
            spread(ratios["raw read / load"]),
            f"{percent(stall['median'])} ({percent(stall['q1'])} to {percent(stall['q3'])})",
        ])  # fmt: skip
    head = ["ranks", "save, s", "load, s", "raw write / save", "raw read / load", "stall of a background save / save"]
    return with_origin(table(head, rows), *names)


def collectives() -> str:
    """Return our calls and PyTorch's for three sizes on two ranks, with the ratio on four."""
    names = ("collectives-cpu-2", "collectives-cpu-4")
    two, four = ({(r["operation"], r["bytes"]): r for r in load(name)["axes"]["dp"]["rows"]} for name in names)
    rows = []
    for (operation, count), row in two.items():
        if "ours" in row["forms"] and count in (2**16, 2**20, 2**24):
            figures = [row["forms"][form]["ms"] for form in ("torch", "ours")]
            on_four = four.get((operation, count))
            rows.append([
                operation, size_text(count), *(f"{x:.3g}" for x in figures), spread(row["ratio"]),
                spread(on_four["ratio"]) if on_four else "",
            ])  # fmt: skip
    head = ["operation", "size", "PyTorch, ms", "ours, ms", "PyTorch / ours", "over dp of dp=2 tp=2"]
    return with_origin(f"{table(head, rows)}\n\n{wrong_text(names)}", *names)


def wrong_text(names: Sequence[str]) -> str:
    """Return the collectives whose results were not those expected on some rank, over all axes and sizes."""
    wrong = [
        f"{row['operation']} over {axis}, {size_text(row['bytes'])}"
        for name in names
        for axis, results in load(name)["axes"].items()
        for row in results["rows"]
        if any(row["wrong"].values())
    ]
    return f"Wrong results, over all axes and sizes: {'; '.join(wrong) or 'none'}."


def matmul() -> str:
    results = load("matmul-cpu")
    rows = []
    for row in results["rows"]:
        figures = [f"{c['tflops']:.3g} ({percent(c['hfu'], 0)})" for c in row["contents"].values()]
        rows.append([row["dtype"], str(row["size"]), *figures])
    peaks = ", ".join(f"{dtype} {flops / 1e12:.3g}" for dtype, flops in results["peak_flops"].items())
    text = table(["dtype", "size", *(f"{c}, TFLOP/s" for c in results["rows"][0]["contents"])], rows)
    return with_origin(f"{text}\n\nThe peaks, in TFLOP/s: {peaks}.", "matmul-cpu")


# ----------------------------------------------------------------------------------------------------------- runs


def window_means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mean losses of the steps in each of `LOSS_WINDOWS`."""
    losses = {row["step"]: row["loss"] for row in rows}
    return [f"{statistics.mean(losses[s] for s in range(first, first + 50)):.3f}" for first in LOSS_WINDOWS]


def about_text(names: Sequence[str]) -> str:
    lines = []
    for about, _ in map(load_run, names):
        lines.append(f"- `{about['command']}`: {about['hardware']}; torch {about['torch']}; commit {about['commit']}")
    return "\n".join(lines)


def first_run() -> str:
    name = "llama_small-cpu-2"
    _, rows = load_run(name)
    median = lambda key: statistics.median(row[key] for row in rows[1:])
    cells = [str(len(rows)), f"{rows[0]['loss']:.3f}", f"{statistics.mean(r['loss'] for r in rows[-20:]):.3f}"]
    cells += [f"{median('tokens_per_s'):,.0f}", percent(median("mfu"))]
    head = ["steps", "first loss", "mean of the last 20", "tokens/s (median)", "MFU (median)"]
    return f"{table(head, [cells])}\n\n{about_text([name])}"


def experts_runs() -> str:
    names = ("llama_small-4096-cpu-1", "moe_small-cpu-1")
    runs = {name: load_run(name)[1] for name in names}
    rows = [[f"`{name.partition('-')[0]}`", str(len(run)), *window_means(run)] for name, run in runs.items()]
    head = ["recipe", "steps", *(f"{first} to {first + 49}" for first in LOSS_WINDOWS)]
    return f"{table(head, rows)}\n\n{about_text(names)}"


def timeline() -> str:
    name = "timeline-zb_h1-cpu-2"
    rows = [panel["title"].split(": ", 1) for panel in load(name)["panels"]]
    rows = [[title, figures.removeprefix("makespan ")] for title, figures in rows]
    return f"{table(['', 'makespan'], rows)}\n\n- `{name}.json`"


PUBLISHED_DILOCO = {  # parameters -> evaluation loss of data parallelism, and of 1, 2, 4 and 8 islands (2503.09799)
    "35M": (3.485, 3.482, 3.508, 3.554, 3.621),
    "550M": (2.653, 2.645, 2.657, 2.673, 2.698),
    "2.4B": (2.326, 2.317, 2.323, 2.332, 2.351),
}


def islands_link() -> str:
    """Return seconds per step over both links, and what the slow link is."""
    names = "islands-link", "islands-link-diloco"
    spread = lambda own: f"{own['median']:.3g} ({own['q1']:.3g} .. {own['q3']:.3g})"
    rows, sees = [], ""
    for results in map(load, names):
        tokens = f"{results['batch'] * results['seq_len']:,}"
        for case, own in results["cases"].items():
            rows.append([case, tokens, spread(own), f"{own['runs'][-1]['sent_mb_per_step']:.2f}"])
        slow = results["link"]["slow"]
        sees = f"{slow['mbit']:.1f} Mbit/s and a round trip of {slow['round_trip_ms']:.0f} ms"
    head = ["exchange, link", "tokens a step", "s/step, median (quartiles)", "MB sent per step and island"]
    diloco = "DiLoCo: int8, H = 30, 3 fragments, a delay of 7 steps."
    text = f"The slow link: {sees}, as a transfer of 5 MB sees them. {diloco}"
    return with_origin(f"{table(head, rows)}\n\n{text}", *names)


def islands_partition() -> str:
    """Return the steps of each side while the network was cut."""
    names = ("islands-partition-2+1", "islands-partition-2+2")
    rows = []
    for name in names:
        results = load(name)
        for side in results["sides"]:
            steps, after = side["steps_during_cut"], side["next_step_after_repair_s"]
            rows.append([name.rpartition("-")[2], ", ".join(side["islands"]), str(steps), f"{after:.1f}"])
    head = ["islands", "side", "steps during the cut", "s from the repair to its next step"]
    return with_origin(table(head, rows), *names)


def islands_recovery() -> str:
    """Return the seconds that a loss costs islands, and a job that restarts from a checkpoint."""
    results = load("islands-recovery")
    names = {
        "step_s": "usual step",
        "next_step_s": "kill to the next new step",
        "lost_s": "time without steps, less a usual step",
        "longest_gap_s": "longest time between two new steps",
    }
    rows = [[text, f"{results['islands'][key]:.2f}", f"{results['job'][key]:.2f}"] for key, text in names.items()]
    head = ["s, median of the rounds", "islands", "restart from a checkpoint"]
    return with_origin(table(head, rows), "islands-recovery")


def islands_churn() -> str:
    """Return the rates of islands that are killed again and again, and of undisturbed ones before and after."""
    results = load("islands-churn")
    names = {
        "before": "undisturbed, before",
        "churn": "with kills",
        "after": "undisturbed, after",
        "all": "undisturbed",
    }
    rows = []
    for phase, text in names.items():
        own = results[phase]
        rates = [f"{own['steps']:,}", f"{own['steps_per_s']:.2f}"]
        gaps = [f"{own['median_gap_s']:.3f}", f"{own['longest_gap_s']:.2f}"]
        rows.append([text, str(own["islands"]), f"{own['seconds'] / 60:.1f}", *rates, *gaps])
    head = ["", "islands", "minutes", "steps", "steps/s", "s between two steps, median", "longest"]
    churned = results["churn"]
    memory, times = churned["survivor"]["rss_mib"], churned["return_s"]
    text = (
        f"{churned['kills']} kills, {churned['kills_of_address_holder']} of the island that listened at "
        f"`islands.address`. Steps per second with kills: {percent(churned['useful_share_of_all'])} of those of all "
        f"islands undisturbed, and {percent(churned['useful_share'])} of one less: they share the same two cores. "
        f"From the start of a returning island to its first step: {times[len(times) // 2]:.1f} s (median), "
        f"{times[-1]:.1f} s (longest). The island that was never killed used {memory['first']:.0f} MiB at the start "
        f"and {memory['last']:.0f} MiB at the end. Faults: {'; '.join(churned['faults']) or 'none'}."
    )
    return with_origin(f"{text}\n\n{table(head, rows)}", "islands-churn")


UPDATES = ("fsdp-2", "dp-2", "tp-2", "fsdp-4", "dp-4")  # meshes of `bench optim`
RIVALS = {"duplicated": "every rank updates all", "gathered": "whole matrices gathered"}


def optim_updates() -> str:
    """Return the time of Muon's update with owners on each mesh, and what other ways take in multiples of it."""
    names, rows = [f"optim-cpu-{mesh}" for mesh in UPDATES], []
    for mesh, result in zip(UPDATES, map(load, names), strict=True):
        ms, ratios = result["ms"], result["ratios"]
        exposed = ms["owners"]["median"] - ms["alone"]["median"]
        rows.append(
            [
                f"`{mesh.replace('-', '=')}`",
                f"{ms['owners']['median']:.0f} ({ms['owners']['q1']:.0f} to {ms['owners']['q3']:.0f})",
                *(spread(ratios[way]) if way in ratios else "-" for way in RIVALS),
                f"{result['exchanges']}, {result['bytes'] / 1e6:.1f} MB",
                f"{exposed:.0f} ms, {percent(exposed / ms['owners']['median'], 0)}",
                f"{result['busiest']:.3f}",
                f"{ms['adamw']['median']:.1f}",
            ]
        )
    head = ["mesh", "owners, ms", *RIVALS.values(), "exchanges", "exposed", "busiest owner / mean", "AdamW, ms"]
    return with_origin(table(head, rows), *names)


def optim_torch() -> str:
    """Return the time of one process's update, and of PyTorch's own Muon in multiples of it."""
    name = "optim-cpu-torch-1"
    result = load(name)
    ours, size = result["ms"]["owners"]["median"], f"{result['parameters'] / 1e6:.1f} M parameters"
    theirs = f"`torch.optim.Muon` with fused AdamW takes {spread(result['ratios']['torch'])} times as long"
    return with_origin(f"One process, {size}, Newton-Schulz in bf16: {ours:.1f} ms. {theirs}.", name)


def mup() -> str:
    """Return the losses at each width by learning rate, with and without muP. The best of a row is bold."""
    of: dict[tuple[int, bool], dict[float, float]] = {}
    for case in load("mup-cpu-1")["cases"]:
        width, base, lr = case["settings"].values()
        of.setdefault((width, base is not None), {})[lr] = case["loss"]
    of |= {(min(width for width, _ in of), True): of[min(of)]}  # the base model is the same with muP
    rates = sorted(next(iter(of.values())))
    cells = lambda losses: [
        f"**{losses[lr]:.3f}**" if losses[lr] == min(losses.values()) else f"{losses[lr]:.3f}" for lr in rates
    ]
    rows = [
        [str(width), "yes" if with_mup else "no", *cells(of[width, with_mup])]
        for width, with_mup in sorted(of, key=lambda x: (x[1], x[0]))
    ]
    return with_origin(table(["hidden size", "muP", *(f"{lr:g}" for lr in rates)], rows), "mup-cpu-1")


def islands_diloco() -> str:
    """Return the best loss of each number of islands, its distance from data parallelism, and the published ones."""
    cases = load("islands-diloco")["cases"]
    alone = min(x["loss"] for x in cases if not x["islands"])
    plain = [x for x in cases if x["islands"] and x["codec"] == "fp32"]
    counts = sorted({x["islands"] for x in plain})
    rows = []
    for i, n in enumerate(counts):
        best = min((x for x in plain if x["islands"] == n), key=lambda x: x["loss"])
        published = [f"{100 * (of[1 + i] / of[0] - 1):+.1f} %" for of in PUBLISHED_DILOCO.values()]
        penalty = f"{100 * (best['loss'] / alone - 1):+.1f} %"
        same = [x for x in plain if (x["islands"], x["lr"]) == (n, best["lr"])]
        rates = [f"{x['loss']:.3f}" for x in sorted(same, key=lambda x: x["outer_lr"])]
        rows.append([str(n), f"{best['loss']:.3f}", penalty, str(best["outer_lr"]), " ".join(rates), *published])
    rates = ", ".join(str(x) for x in sorted({x["outer_lr"] for x in plain}))
    head = ["islands", "loss", "penalty", "best outer rate", f"loss at {rates}", *PUBLISHED_DILOCO]
    text = f"Data parallelism has a loss of {alone:.3f}. A penalty is relative to it."
    others = [x for x in cases if x["codec"] != "fp32"]
    best = min((x for x in plain if x["islands"] == 4), key=lambda x: x["loss"])
    of_codecs = [
        [x["codec"], str(x["fragments"]), str(x["delay"]), f"{x['loss']:.3f}", f"{x['error']:.2g}"]
        for x in (best, *others)
    ]
    codecs = table(["4 islands, codec", "fragments", "delay", "loss", "rounding error"], of_codecs)
    return with_origin(f"{text}\n\n{table(head, rows)}\n\n{codecs}", "islands-diloco")


def scale_ranks() -> str:
    """Return what real ranks have needed to start, train, save and resume."""
    names = sorted((path.stem for path in BENCHMARKS.glob("scale-*-*.json")), key=lambda n: int(n.rpartition("-")[2]))
    rows, hangs = [], []
    for name in names:
        for own in load(name)["runs"]:
            if "diagnosis" in own:
                hangs.append(f"- {own['ranks']} ranks, one of which sleeps, `{own['mesh']}`: `{own['diagnosis']}`")
                continue
            operations, files = own["store_operations"], own["open_files"]
            seconds = [f"{own['first_step_s']:.0f}", f"{own['seconds']:.0f}", f"{own['cpu_s']['median']:.2f}"]
            counts = [f"{operations['median']:.0f}", f"{operations['rank_0']:.0f}", f"{operations['all']:,}"]
            rows.append(
                [str(own["ranks"]), f"`{own['mesh']}`", *seconds, *counts, f"{files['most']}", f"{files['rank_0']}"]
            )
    head = ["ranks", "mesh", "s to the first step", "s to the end", "CPU s of a rank"]
    head += ["store operations of a rank", "of rank 0", "of all", "open files of a rank", "of rank 0"]
    text = table(head, rows)
    return with_origin("\n\n".join([text, "\n".join(hangs)] if hangs else [text]), *names)


SCALE_ROWS = {  # key of scale-table.json -> its row, and the form of its figures
    "configuration_s": ("configuration, s", ".2f"),
    "planning_s": ("a rank's stages without memory, s", ".2f"),
    "groups": ("process groups of a rank, besides two of all ranks", "d"),
    "descriptors": ("descriptors of a rank (estimate)", "d"),
    "descriptors_rank_0": ("descriptors of rank 0 without torchrun (estimate)", ",d"),
    "stragglers_s": ("comparison of all ranks every 20 steps, on rank 0, s", ".4f"),
    "report_bytes": ("report of a rank that hangs, bytes", "d"),
    "hang_read_s": ("reading all reports, s", ".2f"),
    "hang_diagnose_s": ("diagnosis, s", ".2f"),
    "files": ("layout shared: files of a checkpoint", ",d"),
    "files_read": ("files that a rank opens to load, and to save", "d"),
    "writers_of_a_file": ("ranks that write into a file", "d"),
    "writes": ("writes of a rank", ",d"),
    "smallest_write": ("smallest write, bytes", ",d"),
    "median_write": ("median write, bytes", ",.0f"),
    "host_files": ("layout host: files of a checkpoint", ",d"),
    "host_writers_of_a_file": ("ranks that write into a file", "d"),
    "host_writes": ("writes of a rank", ",d"),
    "host_smallest_write": ("smallest write, bytes", ",d"),
    "host_median_write": ("median write, bytes", ",.0f"),
}


def scale_table() -> str:
    """Return what a rank of Llama 3 405B does besides computing."""
    counted = load("scale-table")["rows"]
    form = lambda value, spec: "-" if value is None else format(round(value) if spec.endswith("d") else value, spec)
    rows = [[text, *(form(row[key], spec) for row in counted)] for key, (text, spec) in SCALE_ROWS.items()]
    return with_origin(table(["ranks", *(f"{row['ranks']:,}" for row in counted)], rows), "scale-table")


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        gpu_steps, gpu_peers, gpu_aims, gpu_profile, peers_data, peers_tp, peers_cp, peers_cp_link, peers_pp, step,
        step_profile, checkpoint, collectives, matmul, optim_updates, optim_torch, first_run, experts_runs, mup,
        timeline, islands_link, islands_partition, islands_churn, islands_recovery, islands_diloco,
        scale_ranks, scale_table,
    )
}  # fmt: skip


def page() -> str:
    """Return the text with each line `<!-- table: NAME -->` replaced by that table."""
    text = TEXT.read_text()
    named = PLACE.findall(text)
    if sorted(named) != sorted(TABLES):
        wrong = sorted(set(named) ^ set(TABLES)) or "one of them twice"
        raise SystemExit(f"error: {TEXT.name} and docs/results.py do not name the same tables: {wrong}")
    return GENERATED + PLACE.sub(lambda place: TABLES[place[1]](), text)


def main(args: list[str]) -> int:
    return update([(PAGE, page())], "results.py", args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
