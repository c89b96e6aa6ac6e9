"""The house rules that a machine can check."""

import ast
import re
from pathlib import Path

import ndtrain

ROOT = Path(ndtrain.__file__).parent
# a file imports only from rooms above it
ROOMS = [
    "schedule", "config", "recorder", "mesh", "layout", "sequence", "collectives", "transfer", "cost", "model", "data",
    "parallel", "optim", "program", "safetensors_io", "checkpoint", "step", "metrics", "exit_file", "stopping",
    "failing", "rendezvous", "watch", "start", "loop", "command_line", "launch", "train", "bench", "preflight",
]  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ndtrain":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("ndtrain.")}
    return found


def test_imports_go_one_way():
    for path in sorted(ROOT.rglob("*.py")):
        here = room(path)
        if here in ("__init__", "__main__"):
            continue
        for there in imported_rooms(path) - {here, "__version__"}:
            assert ROOMS.index(there) < ROOMS.index(here), f"{path.relative_to(ROOT)} imports {there}, a room below it"


def test_the_model_knows_no_mesh():
    words = re.compile(r"\b(mesh|ranks?|groups?|tp|cp|fsdp|dp|torch\.distributed)\b", re.IGNORECASE)
    for path in (ROOT / "model").glob("*.py"):
        found = words.findall(path.read_text())
        assert not found, f"{path.name} speaks of {found}"


def test_schedules_need_no_torch():
    for path in (ROOT / "schedule").glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), f"{path.name} imports torch"
