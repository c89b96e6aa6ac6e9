"""The messages on the troubleshooting page are messages of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import ndtrain

ROOT = Path(ndtrain.__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PLACEHOLDER = r"\b[A-Z]+\b"  # a value on the page; so that CUDA and GPU are compared, both sides lose them
# a row whose first cell is one message and nothing else; what other programs print has their name behind it
MESSAGES = re.findall(r"^\| `([^`]*[ :][^`]*)` \|", PAGE, flags=re.MULTILINE)


def plain(text: str) -> str:
    return re.sub(r"\*+", "*", re.sub(PLACEHOLDER, "*", text).replace("\n", " "))


def text_of(node: ast.AST) -> str | None:
    """A string of the code, with a placeholder for each value; nothing if the node is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def strings() -> list[str]:
    """Every string of the package, and every line of the launch scripts."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "ndtrain").rglob("*.py")]
    texts = [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]
    for script in filter(Path.is_file, (ROOT / "launch").iterdir()):
        texts += [re.sub(r"\$\{?\w+\}?", "X", line) for line in script.read_text().splitlines()]
    return [plain(text) for text in texts]


def test_page_quotes_more_than_30_messages():
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_message_exists_in_code(message: str):
    assert any(plain(message) in text for text in strings()), f"no string of ndtrain or launch/ contains {message!r}"
