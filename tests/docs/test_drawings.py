"""The pictures of the documentation are those that docs/drawings.py makes of today's code."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ndtrain

ROOT = Path(ndtrain.__file__).parent.parent
PICTURES = sorted((ROOT / "docs" / "img").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
PHONE, LEAST = 358, 9  # pixels: of a picture on a phone's page of 390, of the text in it


@pytest.mark.parametrize("script", ["drawings.py", pytest.param("plan_drawings.py", marks=pytest.mark.full)])
def test_pictures_are_current(script):
    done = subprocess.run(
        [sys.executable, f"docs/{script}", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_its_text_is_readable_on_a_phone(path: Path):
    root = ElementTree.parse(path).getroot()
    title = root.find(f"{SVG}title")
    assert title is not None and title.text
    shrunk = min(1, PHONE / float(root.get("width")))
    sizes = [shrunk * size for size in text_sizes(root)]
    assert sizes and min(sizes) >= LEAST


def text_sizes(element: ElementTree.Element, inherited: float = 16) -> Iterator[float]:
    """The font size of each text, which it has from an element around it if not its own."""
    size = float(element.get("font-size") or inherited)
    if element.tag == f"{SVG}text":
        yield size
    for inner in element:
        yield from text_sizes(inner, size)


def test_all_pictures_of_the_pages_are_checked():
    for page in (ROOT / "docs").rglob("*.md"):
        for picture in re.findall(r"!\[[^]]*\]\((\S+?)\)", page.read_text()):
            assert (page.parent / picture).resolve() in PICTURES, f"{page.name}: {picture}"


def test_every_picture_is_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    missing = [path.name for path in PICTURES if path.name not in pages]
    assert not missing, f"on no page: {', '.join(missing)}"
