"""Near misses of misspelt words."""

import difflib
from collections.abc import Sequence


def near(word: str, known: Sequence[str]) -> str:
    """`did you mean 'x'? ` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
