"""`key=value` arguments: read by the types of a dataclass, explained by --help, mistakes are one line."""

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from ndtrain.arguments import ArgumentError, help_lines, option, parse
from ndtrain.bench.__main__ import BENCHES, main, module_of


@dataclass(frozen=True)
class Options:
    axis: Literal["dp", "tp"] = option("which axis")
    ranks: int = option("processes", 2)
    level: Literal[1, 2] = option("how much", 1)
    path: str | None = option("a file", None)
    fast: bool = option("quickly", False)
    cost: float = option("a time", 1.0, "cost.F", lambda key, text: float(text))


def test_parse_reads_values_by_field_type():
    assert parse(Options, ["axis=tp"]) == Options(axis="tp")
    args = ["ranks=3", "axis=dp", "level=2", "path=a=b", "fast=true", "cost.F=2.5"]
    assert parse(Options, args) == Options("dp", 3, 2, "a=b", True, 2.5)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "axis is missing; known: dp, tp"),
        (["axis"], "axis: arguments are key=value; known keys: axis, ranks, level, path, fast, cost.F"),
        (["rank=2"], "rank: no such key; did you mean 'ranks'? known: axis"),
        (["cost=2"], "cost: no such key; did you mean 'cost.F'?"),
        (["axis=pp"], "pp: no such axis; did you mean 'tp'? known: dp, tp"),
        (["ranks=-1"], "ranks=-1: must be a whole number, at least 1"),
        (["level=3"], "3: no such level; known: 1, 2"),
        (["fast=yes"], "yes: no such fast; known: true, false"),
        (["path="], "path=: arguments are key=value"),
    ],
)
def test_parse_error_names_argument(args, said):
    with pytest.raises(ArgumentError) as error:
        parse(Options, args)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_help_lines_list_every_option():
    lines = help_lines(Options).splitlines()
    assert [line.split()[0] for line in lines] == ["axis", "ranks", "level", "path", "fast", "cost.F"]
    assert lines[0].endswith("which axis (dp | tp; required)") and lines[4].endswith("(true | false; default false)")


@pytest.mark.parametrize("args", [*([name] for name in BENCHES), ["peers", "axis=cp"]], ids=" ".join)
def test_bench_help_lists_every_option(args, capsys):
    assert main([*args, "--help"]) == 0
    module = module_of(args[0], args[1:])
    keys = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert keys >= {f.name for f in fields(module.Options)}


def test_bench_help_lists_every_bench(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in BENCHES)
