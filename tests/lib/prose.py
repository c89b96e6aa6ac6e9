"""Checks the English of docstrings and comments by rules that a program can check.

python -m tests.lib.prose ndtrain/plan     # prints what breaks a rule, one line each
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25  # of a sentence
# How no docstring begins, and what no function's begins with: it begins with a verb in the imperative.
NO_OPENING = {"of", "as", "what", "whether", "whose", "where", "those", "inside", "which"}
_NOT_VERBS = """the a an this that these each every all both any one no none it its in on at by for from with without to
if when while how who there here two true false only"""
NO_VERB = NO_OPENING | set(_NOT_VERBS.split())
THIRD_PERSON = re.compile(
    r"(returns|yields|makes|reads|writes|runs|gives|takes|sends|adds|sets|says|checks|computes|raises|calls|waits|"
    r"builds|loads|saves|opens|closes|counts|finds|keeps|holds|puts|gets|fills|sums|moves|starts|begins|ends|\w+[^s]es)$"
)
BANNED = {
    r"that of": "repeat the noun",
    r"those of": "repeat the noun",
    r"beside": "besides, next to, in addition to, compared with",
    r"so many": "the number: 'every n layers', 'n bytes'",
    r"as many": "the same number of, as much as, up to",
    r"at hand": "available, known, in memory",
    r"(come|comes|came|coming) back": "return",
    r"(take|takes|took|taken) back": "undo, reset",
    r"(says|said|told|asks)": "of code: specifies, names, describes, reads, requests",
    r"(lie|lies|lay|stand|stands|stood)": "is, are, starts at, is stored in",
    r"none's": "say who owns it",
    r"the other one": "repeat the noun",
}
_BANNED = {re.compile(rf"\b{pattern}\b", re.IGNORECASE): better for pattern, better in BANNED.items()}
_STRUCTURE = re.compile(r"^\s*(Args|Attributes|Raises|Returns|Yields):\s*$", re.MULTILINE)
_FIELD = re.compile(r"^\s*[\w*`, .\[\]]{1,60}:\s", re.MULTILINE)  # `name: what it is`


def faults_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for each rule that a docstring or a comment of a file breaks."""
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = node.body[0].lineno
                yield from ((line, fault) for fault in _faults_of_docstring(node, docstring))
    for line, comment in _comments(text):
        yield from ((line, fault) for fault in _faults_of_text(comment))


def _faults_of_docstring(node: ast.AST, docstring: str) -> Iterator[str]:
    first = re.match(r"[A-Za-z]*", docstring)[0].lower()
    if first in NO_OPENING:
        yield f"begins with {first!r}"
    elif _is_plain_function(node) and (first in NO_VERB or THIRD_PERSON.match(first)):
        yield f"begins with {first!r}, not with a verb in the imperative (Return, Gather, Split)"
    yield from _faults_of_text(docstring)


def _is_plain_function(node: ast.AST) -> bool:
    """Return True for a function that a docstring names by what it does: not for a property or a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return False
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return not any(d.endswith(("property", "fixture")) or "fixture(" in d or d.endswith(".setter") for d in decorators)


def _faults_of_text(text: str) -> Iterator[str]:
    plain = _without_code(text)
    for pattern, better in _BANNED.items():
        for match in pattern.finditer(plain):
            yield f"{match[0]!r}: {better}"
    for sentence in _sentences(plain):
        if (count := len(sentence.split())) > MOST_WORDS:
            yield f"a sentence of {count} words: {' '.join(sentence.split()[:6])} ..."


def _without_code(text: str) -> str:
    """Return a text without examples, tables, drawings and inline code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"``?[^`]*``?", "X", text)
    text = re.sub(r"https?://\S+|arXiv:\S+", "X", text)
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*\||\s*[-+=#]{3}|\s{4,}\S+ {2,}\S", line))


def _sentences(text: str) -> list[str]:
    """Return the sentences. A field (`name: text`), an item of a list and an empty line begin a new one."""
    text = _STRUCTURE.sub(".", text)
    text = _FIELD.sub(". ", text)
    text = re.sub(r"\n\s*\n|^\s*[-*] ", ". ", text, flags=re.MULTILINE)
    return re.split(r"[.?!;:](?:\s|$)|\s\(|\)\s", text)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment; neighbouring lines that hold nothing else are one."""
    block: list[str] = []
    begin = last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone, line = token.line.lstrip().startswith("#"), token.start[0]
        content = token.string.lstrip("# ").rstrip()
        if re.match(r"(fmt|type|noqa|ruff|shellcheck|-{3,})", content):
            continue
        if alone and line == last + 1 and block:
            block.append(content)
        else:
            if block:
                yield begin, "\n".join(block)
            block, begin = [content], line
        last = line if alone else -1
    if block:
        yield begin, "\n".join(block)


def python_files(paths: list[str]) -> list[Path]:
    return [f for p in map(Path, paths) for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]


def main(paths: list[str]) -> int:
    found = [(path, line, fault) for path in python_files(paths) for line, fault in faults_of(path)]
    for path, line, fault in found:
        print(f"{path}:{line}: {fault}")
    print(f"{len(found)} faults")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
