"""The pictures of the documentation are those that docs/drawings.py makes of today's code."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ndtrain

ROOT = Path(ndtrain.__file__).parent.parent
PICTURES = sorted((ROOT / "docs" / "img").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("script", ["drawings.py", pytest.param("plan_drawings.py", marks=pytest.mark.full)])
def test_no_picture_is_stale(script):
    done = subprocess.run(
        [sys.executable, f"docs/{script}", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_can_be_read(path: Path):
    root = ElementTree.parse(path).getroot()
    title = root.find(f"{SVG}title")
    assert title is not None and title.text
    sizes = [float(text.get("font-size") or root.get("font-size")) for text in root.iter(f"{SVG}text")]
    assert sizes and min(sizes) >= 11


def test_every_picture_is_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    missing = [path.name for path in PICTURES if path.name not in pages]
    assert not missing, f"on no page: {', '.join(missing)}"
