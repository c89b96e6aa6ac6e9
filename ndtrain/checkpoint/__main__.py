"""Inspects and converts checkpoints: python -m ndtrain.checkpoint COMMAND ...

  list RUN...                    the checkpoints of run folders: step, size, time, whether they are complete, contents
  verify CHECKPOINT...           compare every byte with its checksum, in all checkpoints of a run folder;
                                 exit status 1 if a file is bad
  diff A B                       the tensors and the configuration that differ; exit status 1 if anything differs
  average CKPT... out=FOLDER     the mean of their weights, as a Hugging Face folder
  cast CKPT dtype=bf16 out=FOLDER
                                 the weights in another precision, as a Hugging Face folder

  merge CKPT FOLDER              a checkpoint of checkpoint.layout=host, in the default layout

A CHECKPOINT is a folder step-*, or a run folder (its newest checkpoint). diff, average and cast also accept Hugging
Face folders. Start a run from their output with init_from=FOLDER. Keys of average and cast:

{options}
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndtrain.arguments import ArgumentError, help_lines, one_of, option, parse, status_of, wants_help
from ndtrain.checkpoint.comparing import Difference, diff
from ndtrain.checkpoint.directory import list_checkpoints
from ndtrain.checkpoint.elements import CheckpointError
from ndtrain.checkpoint.merging import merge
from ndtrain.checkpoint.rewriting import average
from ndtrain.checkpoint.safetensors_io import DamagedFile
from ndtrain.checkpoint.verifying import SHORT, Listed, checkpoints_of, describe, verify
from ndtrain.config import ConfigError
from ndtrain.config.store import folder_at, is_address

DTYPES = {name: dtype for dtype, name in SHORT.items()}
_SHOWN = 20  # lines of a kind that diff prints


def _weights(key: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ArgumentError(f"{key}={text}: must be numbers separated by commas, one for each checkpoint") from None


def _dtype(key: str, text: str) -> str:
    return one_of(key, text, list(DTYPES))


@dataclass(frozen=True)
class Options:
    """The keys of average and cast."""

    out: str = option("folder to create")
    dtype: str | None = option(f"{', '.join(DTYPES)}: dtype of the output (default: the first checkpoint's)", None,
                               read=_dtype)  # fmt: skip
    weights: tuple[float, ...] | None = option(
        "average: weight of each checkpoint, e.g. weights=1,2,1, divided by their sum (default: equal weights)",
        None, read=_weights,
    )  # fmt: skip
    ema: bool = option("read the moving average of optim.ema instead of the weights", False)


def main(args: Sequence[str]) -> int:
    """Run a command and return the exit status. For unusable arguments, print the reason in one line and return 2."""
    if not args or wants_help(args):
        print((__doc__ or "").format(options=help_lines(Options)).strip())
        return 0 if args else 2
    try:
        command = COMMANDS[one_of("command", args[0], list(COMMANDS))]
        words = [word for word in args[1:] if not _is_option(word)]
        return command([folder_at(w) for w in words], [word for word in args[1:] if word not in words])
    except (ArgumentError, ConfigError, DamagedFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _is_option(word: str) -> bool:
    """Return True if a word is key=value, and not a folder. The folder of a sweep may have an = in its name too."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.isidentifier() and not is_address(key) and not Path(word).exists()


def one_checkpoint(path: Path) -> Path:
    """Return the checkpoint or Hugging Face folder that a path names. For a run folder, return its newest checkpoint.

    Raises:
        CheckpointError: the path does not exist.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    return next(iter(list_checkpoints(path / "checkpoints") or list_checkpoints(path)), path)


def _need(paths: Sequence[Path], what: str, least: int, most: int | None = None) -> None:
    if len(paths) < least or (most is not None and len(paths) > most):
        raise ArgumentError(f"{what}; {len(paths)} given")


def _no_options(options: Sequence[str]) -> None:
    if options:
        raise ArgumentError(f"{options[0]}: no such folder, and this command has no keys")


# -------------------------------------------------------------------------------------------------------------- list


def list_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Print a line for each checkpoint."""
    _no_options(options)
    _need(paths, "list takes run folders", 1)
    for path in paths:
        listed = [describe(p) for p in checkpoints_of(path, others=True)]
        rows = [_cells(x) for x in listed]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _cells(x: Listed) -> list[str]:
    state = x.state or {}
    mesh = " ".join(f"{axis}={n}" for axis, n in state.get("mesh", {}).items() if axis != "zero" and n > 1)
    return [
        str(x.path),
        f"step {state['step']:,}" if state else "",
        f"{state['tokens']:,} tokens" if state else "",
        size_text(x.size),
        x.saved.strftime("%Y-%m-%d %H:%M:%S"),
        ", ".join(f"{kind} {dtype}" for kind, dtype in x.parts.items()),
        f"mesh {mesh or 'one process'}" if state else "",
        x.status,
    ]


def size_text(size: int) -> str:
    """Format a number of bytes with three digits and a unit."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = max(i for i in range(len(units)) if size >= 1024**i or i == 0)
    return f"{size / 1024**power:.3g} {units[power]}" if power else f"{size} bytes"


# ------------------------------------------------------------------------------------------------------------ verify


def verify_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Verify checkpoints. Return 1 if a file is bad."""
    _no_options(options)
    _need(paths, "verify takes checkpoints or run folders", 1)
    bad = 0
    for path in (p for given in paths for p in checkpoints_of(given)):
        problems = verify(path)
        for problem in filter(None, problems.values()):
            print(f"bad: {path}: {problem}", flush=True)
            bad += 1
        if not any(problems.values()):
            print(f"good: {path}: {len(problems)} files", flush=True)
    return 1 if bad else 0


# -------------------------------------------------------------------------------------------------------------- diff


def diff_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Print the differences. Return 1 if there are any."""
    _no_options(options)
    _need(paths, "diff takes two checkpoints or Hugging Face folders", 2, 2)
    difference = diff(one_checkpoint(paths[0]), one_checkpoint(paths[1]))
    for line in lines_of(difference):
        print(line)
    return 1 if difference else 0


def lines_of(d: Difference) -> list[str]:
    """Return the lines that describe a difference. The tensors that differ most come first."""
    lines = [f"config {key}: {a} | {b}" for key, (a, b) in d.config.items()]
    lines += _shortened([f"only in A: {name}" for name in d.only_a], "tensors only in A")
    lines += _shortened([f"only in B: {name}" for name in d.only_b], "tensors only in B")
    lines += _shortened([f"shape {name}: {a} | {b}" for name, (a, b) in d.shapes.items()], "other shapes")
    lines += _shortened([f"dtype {name}: {a} | {b}" for name, (a, b) in d.dtypes.items()], "other dtypes")
    worst = sorted(d.tensors, key=lambda t: (t.relative != t.relative, t.relative), reverse=True)
    lines += _shortened(
        [f"{t.name}: {t.elements:,} of {t.all:,} elements, largest {t.largest:.3g}, relative {t.relative:.3g}"
         for t in worst], "other tensors that differ",
    )  # fmt: skip
    lines.append(f"{len(d.tensors)} tensors differ, {d.same} are equal")
    return lines


def _shortened(lines: list[str], what: str) -> list[str]:
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"... and {rest} {what}"] if rest > 0 else lines


# ---------------------------------------------------------------------------------------------------- average and cast


def average_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Average checkpoints."""
    o = parse(Options, options)
    _need(paths, "average takes two checkpoints or more", 2)
    return _rewrite(paths, o, f"average of {len(paths)}")


def cast_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Cast a checkpoint."""
    o = parse(Options, options)
    _need(paths, "cast takes one checkpoint", 1, 1)
    if o.weights is not None:
        raise ArgumentError("weights: a key of average, not of cast: remove it")
    if o.dtype is None:
        raise ArgumentError(f"dtype is missing; known: {', '.join(DTYPES)}")
    return _rewrite(paths, o, f"{paths[0]} as {o.dtype}")


def _rewrite(paths: Sequence[Path], o: Options, what: str) -> int:
    out = Path(o.out).expanduser()
    size = average([one_checkpoint(p) for p in paths], out, o.weights, DTYPES[o.dtype] if o.dtype else None, o.ema)
    print(f"{out}: {what}, {size_text(size)}; start from it with init_from={out}")
    return 0


# -------------------------------------------------------------------------------------------------------------- merge


def merge_command(paths: Sequence[Path], options: Sequence[str]) -> int:
    """Merge the files of the hosts."""
    _no_options(options)
    _need(paths, "merge takes a checkpoint and the folder to create", 2, 2)
    source, out = one_checkpoint(paths[0]), paths[1].expanduser()
    size = merge(source, out)
    print(f"{out}: {source} in the layout shared, {size_text(size)}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[Path], Sequence[str]], int]] = {
    "list": list_command, "verify": verify_command, "diff": diff_command, "average": average_command,
    "cast": cast_command, "merge": merge_command,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(status_of(main))
