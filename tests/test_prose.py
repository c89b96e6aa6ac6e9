"""Docstrings and comments follow the rules of English that a program can check (`tests/lib/prose.py`)."""

from pathlib import Path

import pytest

import ndtrain
from tests.lib.prose import faults_of, python_files

ROOT = Path(ndtrain.__file__).parent
ROOMS = sorted({path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")})


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_comments_break_no_rule(room):
    found = [f"{path}:{line}: {fault}" for path in python_files([str(ROOT / room)]) for line, fault in faults_of(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('def f():\n    """Whether it is so."""\n', "begins with 'whether'"),
        ('def f():\n    """The rows of x."""\n', "begins with 'the'"),
        ('def f():\n    """Returns the rows."""\n', "begins with 'returns'"),
        ('class A:\n    """Of a rank: its rows."""\n', "begins with 'of'"),
        ("x = 1  # the shape is that of y\n", "'that of'"),
        ('def f():\n    """Return x. ' + "word " * 26 + '."""\n', "a sentence of 26 words"),
        ('def f():\n    """Return the rows of x."""\n', None),
        ('class A:\n    """A rank."""\n\n    @property\n    def rows(self):\n        """The rows."""\n', None),
    ],
)
def test_faults_of_names_what_breaks_a_rule(text, fault, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(text)
    found = [said for _, said in faults_of(path)]
    assert not found if fault is None else len(found) == 1 and found[0].startswith(fault)
