"""Everyone can tell the kinds of action of a timeline apart, also with a colour vision deficiency."""

from itertools import combinations
from math import dist

import numpy as np
import pytest

from ndtrain.schedule.draw import COLOURS, _shade

# how linear RGB looks without one kind of cone (Machado et al., 2009, severity 1)
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
APART = 15  # difference in CIELAB; about 2 is just noticeable for large fields side by side


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """`#rrggbb` as it looks, in CIELAB."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(vision @ linear, 0, 1) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_action_colours_are_distinguishable(vision, chunks):
    seen = [(kind, lab(_shade(kind, c, chunks)[0], VISIONS[vision])) for kind in COLOURS for c in range(chunks)]
    for (kind, a), (other, b) in combinations(seen, 2):
        assert kind == other or dist(a, b) >= APART, f"{kind} and {other}: {dist(a, b):.0f}"


@pytest.mark.parametrize("kind", COLOURS)
def test_numbers_are_legible_on_every_shade(kind):
    """The contrast is at least 4.5 (WCAG 2, level AA)."""
    for chunk in range(4):
        colour, text = _shade(kind, chunk, 4)
        light = lambda c: (lab(c, VISIONS["all cones"])[0] + 16) / 116
        brighter, darker = sorted(
            (light(colour) ** 3, light({"w": "#ffffff", "k": "#000000"}[text]) ** 3), reverse=True
        )
        assert (brighter + 0.05) / (darker + 0.05) >= 4.5, f"{colour} under {text}"
