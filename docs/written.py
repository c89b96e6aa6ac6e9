"""Writes generated files of the documentation, or compares them with what is there."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def update(made: Iterable[tuple[Path, str]], script: str, args: Sequence[str]) -> int:
    """Write files, or compare them with `--check`. Return the exit status.

    Args:
        made: each file and its text.
        script: the script in docs/ that makes them.
        args: the arguments of the script.
    """
    if list(args) not in ([], ["--check"]):
        print(f"error: {' '.join(args)}: known: --check", file=sys.stderr)
        return 2
    stale = []
    for path, text in made:
        if not args:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python docs/{script}", file=sys.stderr)
    return 1 if stale else 0
