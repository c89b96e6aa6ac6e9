"""Finds the longest sequence whose training step fits into memory."""

from collections.abc import Callable, Mapping

Peak = Callable[[int], int | None]  # tokens -> peak bytes, or None if the tokens do not fit
USABLE = 0.98  # share of the memory up to which a peak is expected to fit


def longest(peak: Peak, start: int, most: int, grain: int, memory: int | None = None) -> int:
    """Return the largest multiple of `grain`, up to `most`, that fits, or 0 if none fits. Assumes that lengths below
    one that fits do fit too.

    Doubles from `start`, then bisects. If the memory is known, a line through the last two peaks predicts the next
    length to try. A peak is nearly linear in the tokens, and long sequences take minutes.

    Args:
        memory: bytes of the device.
    """
    good, bad, length = 0, most + grain, start
    peaks: dict[int, int] = {}
    while bad - good > grain:
        needed = peak(length)
        if needed is None:
            bad = length
        else:
            good, peaks[length] = length, needed
        guess = _on_line(peaks, memory)
        if guess is None or guess >= bad:
            guess = min(2 * good, most) if bad > most else (good + bad) // 2
        length = max(good + grain, min(guess, bad - grain)) // grain * grain
    return good


def _on_line(peaks: Mapping[int, int], memory: int | None) -> int | None:
    """Return the tokens at which the line through the last two peaks reaches the usable memory."""
    if memory is None or len(peaks) < 2:
        return None
    (a, low), (b, high) = sorted(peaks.items())[-2:]
    return int(b + (USABLE * memory - high) * (b - a) / (high - low)) if high > low else None
