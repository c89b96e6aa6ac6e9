"""Writes docs/configuration.md: every key of a run, read from the schema and from the option files in conf/.

python docs/generate.py           # writes the page
python docs/generate.py --check   # exit status 1, and one line, where the page is stale
"""

import ast
import importlib
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from written import update

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
GENERATED = "<!-- Written by docs/generate.py from ndtrain/config/schema.py. Change the schema, not this page. -->\n"
INTRODUCTION = """\
# Configuration

A run is one tree of keys. Every key can be set on the command line as `section.key=value`. A value in a recipe
overrides the default on this page, and the command line overrides the recipe.

```bash
python -m ndtrain.train recipe=llama_small train.steps=100 optim.lr=1e-3   # sets two keys
python -m ndtrain.train --cfg job recipe=llama_small                       # prints every key with its value
python -m ndtrain.train --multirun recipe=llama_debug optim.lr=1e-3,3e-3
```

A section with options is a Hydra config group. `schedule=zb_h1` selects the file `conf/schedule/zb_h1.yaml`, which sets
keys of the section `schedule`. An unknown key or option ends the program with one line that names the closest match.
Every other error of the configuration is also one line, which names the key and the fix. It is printed before any
process group is created.
"""


@dataclass
class Key:
    """One row of the page."""

    name: str
    type: str
    default: str
    allowed: str
    meaning: str


@dataclass
class Source:
    """The text of a module: its classes by name, and its comments by line number."""

    classes: dict[str, ast.ClassDef]
    comments: dict[int, str]
    comment_lines: set[int]  # lines that hold nothing but a comment


def read_source(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}
    alone = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}
    return Source({n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}, comments, alone)


def source_of(cls: type) -> Source:
    return read_source(Path(importlib.import_module(cls.__module__).__file__))


def section_keys(cls: type) -> Iterator[Key]:
    """The keys of a section, in the order of the schema; sections inside it are left out."""
    source = source_of(cls)
    nodes = {n.target.id: n for n in source.classes[cls.__name__].body if isinstance(n, ast.AnnAssign)}
    for f in fields(cls):
        if section_of(f) is None:
            node = nodes[f.name]
            meaning = f.metadata.get("help") or comment_of(node, source)
            kind = "str or list[str]" if f.metadata.get("several") else type_text(node)
            yield Key(f.name, kind, value_text(default_of(f)), allowed_text(f), meaning)


def section_of(f: Field) -> type | None:
    return f.default_factory if is_dataclass(f.default_factory) else None


def comment_of(node: ast.AnnAssign, source: Source) -> str:
    """The comments on a field's own lines and on the lines directly above it, as one text."""
    above = node.lineno
    while above - 1 in source.comment_lines:
        above -= 1
    return " ".join(source.comments[n] for n in range(above, node.end_lineno + 1) if n in source.comments)


def type_text(node: ast.AnnAssign) -> str:
    return ast.unparse(node.annotation).replace("None", "null").replace(" | ", " or ")


def default_of(f: Field) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def value_text(value: Any) -> str:
    """A value as it is written in YAML and on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return str(value)


def allowed_text(f: Field) -> str:
    choices, least = [*f.metadata.get("choices", ()), *part_names(f.metadata.get("part"))], f.metadata.get("least")
    choices = list(dict.fromkeys(choices))
    parts = [", ".join(f"`{value_text(c)}`" for c in choices)] if choices else []
    parts += [f"at least {least}"] if least is not None else []
    return "; ".join(parts + ["above 0"] * ("positive" in f.metadata))


def part_names(kind: str | None) -> list[str]:
    """The names of ndtrain's own registered parts of a kind, which are values too."""
    registry = importlib.import_module("ndtrain.config.registry")
    plugins = {part.name for part in registry.plugin_parts(kind)}
    return [name for name in registry.names(kind) if name not in plugins] if kind else []


def escape(text: str) -> str:
    """Plain text as Markdown: without tags, and without the character that ends a table's cell."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


def table(keys: list[Key], prefix: str) -> str:
    """The keys as a table; without the column of allowed values where no key declares any."""
    declared = any(k.allowed for k in keys)
    head = ["key", "type", "default", *["allowed"] * declared, "meaning"]
    rows = [head, ["---"] * len(head)]
    for k in keys:
        row = [f"`{prefix}{k.name}`", k.type, f"`{k.default}`" if k.default else "empty"]
        rows.append([*row, *[k.allowed] * declared, escape(k.meaning)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def options_text(folder: Path, name: str) -> str:
    """The options of a config group, each with the first comment line of its file; empty where there is no group."""
    lines = []
    for path in sorted(folder.glob("*.yaml")):
        comments = [x[1:].strip() for x in path.read_text().splitlines() if x.startswith("#") and "@package" not in x]
        lines.append(f"- `{name}={path.stem}`" + (f": {escape(' '.join(comments))}" if comments else ""))
    if len(lines) < 2:
        return ""
    return f"\nOptions of the group `{name}`:\n\n" + "\n".join(lines) + "\n"


def section_text(name: str, cls: type) -> str:
    """A section: its docstring, its options and its keys."""
    docstring = ast.get_docstring(source_of(cls).classes[cls.__name__])
    parts = [f"## {name}\n"] + ([f"\n{docstring}\n"] if docstring else [])
    return "".join(parts) + options_text(ROOT / "conf" / name, name) + "\n" + table([*section_keys(cls)], f"{name}.")


def page() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT))
    config = importlib.import_module("ndtrain.config.schema").Config
    parts = [GENERATED, INTRODUCTION, f"## recipe\n{options_text(ROOT / 'recipes', 'recipe')}"]
    parts += [f"## Top level\n\n{table([*section_keys(config)], '')}\n"]
    parts += [section_text(f.name, section_of(f)) + "\n" for f in fields(config) if section_of(f)]
    return "\n".join(parts)


def main(args: list[str]) -> int:
    return update([(PAGE, page())], "generate.py", args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
