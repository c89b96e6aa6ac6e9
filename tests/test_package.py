"""The rules of the package that a test can check."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import ndtrain
from ndtrain.config import ModelConfig

ROOT = Path(ndtrain.__file__).parent
# data flows down this list: a file imports only from packages above its own
ORDER = [
    "arguments", "schedule", "config", "plugins", "device", "model", "mesh", "data", "optim", "parallel", "program",
    "checkpoint", "islands", "observe", "run", "engine", "train", "evaluate", "generate", "report", "measure", "bench",
    "plan", "preflight",
]  # fmt: skip
TAKE_CONFIG = {
    "parallel/build.build_stages", "parallel/build.state_plan", "parallel/distribution.of", "checkpoint/saver.__init__",
    "checkpoint/saving.save", "checkpoint/upcycling.starting_model", "program/step.of", "program/step.prove_if_short",
}  # fmt: skip
LOOSE = {"__init__.py", "plugins.py", "train.py", "evaluate.py", "generate.py"}  # all other modules are in a folder


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ndtrain":
            parts = node.module.split(".")
            packages |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        if isinstance(node, ast.Import):
            packages |= {a.name.split(".")[1] for a in node.names if a.name.startswith("ndtrain.")}
    return packages


def test_every_module_is_in_a_folder():
    assert {path.name for path in ROOT.glob("*.py")} == LOOSE


def test_packages_import_only_packages_below():
    for path in sorted(ROOT.rglob("*.py")):
        here = package_of(path)
        if here == "__init__":
            continue
        for there in imported_packages(path) - {here, "__version__"}:
            assert ORDER.index(there) < ORDER.index(here), f"{path.relative_to(ROOT)} imports {there}, a package below"


def takes_config(function: ast.FunctionDef) -> bool:
    return any(arg.annotation is not None and ast.unparse(arg.annotation) == "Config" for arg in function.args.args)


def test_parts_of_a_stage_do_not_see_the_whole_configuration():
    """They get sections of it, or records that the functions in `TAKE_CONFIG` make from it."""
    found = set()
    for folder in ("program", "parallel", "checkpoint"):
        for path in (ROOT / folder).rglob("*.py"):
            functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
            found |= {f"{folder}/{path.stem}.{f.name}" for f in functions if takes_config(f)}
    assert found == TAKE_CONFIG


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {path: ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The modules that a file imports, also those that only a type checker sees. What is imported inside a function,
    when it runs, does not count."""
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= below or ({node.module} & known)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif not isinstance(node, ast.FunctionDef):
            left += ast.iter_child_nodes(node)
    return found


def test_modules_have_no_import_cycles():
    known = modules()
    imports = {name: imported_modules(path, set(known)) - {name} for name, path in known.items()}
    while free := {name for name, needed in imports.items() if not needed & imports.keys()}:
        for name in free:
            del imports[name]
    assert not imports, f"these files import each other in a circle: {sorted(imports)}"


def test_training_without_islands_imports_none_of_their_modules():
    known, found, left = modules(), set(), {"ndtrain.train"}
    while left:
        found |= left
        left = set().union(*(imported_modules(known[name], set(known)) for name in left)) - found
    assert "ndtrain.engine.trainer" in found
    of_islands = {name for name in found if name.startswith("ndtrain.islands") or "island" in name.split(".")[-1]}
    assert of_islands == {"ndtrain.config.island_checks"}


def test_package_does_not_import_lab():
    for path in ROOT.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) lab", path.read_text(), re.MULTILINE), f"{path} imports lab"


def test_model_package_does_not_mention_mesh():
    """Comments may say what replaces a call; imports and identifiers do not mention the mesh."""
    words = {"mesh", "rank", "ranks", "group", "groups", "tp", "cp", "fsdp", "dp", "distributed"}
    for path in (ROOT / "model").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert "mesh" not in imported_packages(path), f"{path.name} imports ndtrain.mesh"
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg | ast.keyword) and n.arg}
        names -= {f.name for f in fields(ModelConfig)}  # Hugging Face's: q_lora_rank, n_group
        parts = {part for name in names for part in name.lower().split("_")}
        assert not parts & words, f"{path.name} has identifiers of {parts & words}"


def test_schedule_package_does_not_import_torch():
    for path in (ROOT / "schedule").glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), f"{path.name} imports torch"
