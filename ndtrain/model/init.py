"""Initial weights as a pure function of (seed, parameter name, element), so that they do not depend on the sharding.

Element `e` of a parameter is computed from the `e`-th 64-bit word of a Philox counter stream (Salmon et al., 2011),
whose key is derived from the seed and the name. Any range can therefore be drawn independently.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.name_patterns import factor_of
from ndtrain.model.families import family_of
from ndtrain.model.spec import Init, Param, Role

_WORDS_PER_COUNT = 4  # Philox-4x64 gives four words per counter
_BLOCK = 1 << 20  # number of elements drawn at once
_WIDTH_POWER = {Role.HIDDEN: 0.5, Role.READOUT: 1.0, Role.OTHER: 0.0}  # of standard deviations, with `mup_base`


def standard_normal(seed: int, name: str, start: int, length: int) -> Tensor:
    """Return elements [start, start + length) of the parameter's N(0, 1) stream, fp64 [length]."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    lead = start % _WORDS_PER_COUNT
    bits = np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64), counter=start // _WORDS_PER_COUNT)
    words = bits.random_raw(lead + length)[lead:]
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside (0, 1)
    return torch.special.ndtri(torch.from_numpy(uniform))


Draw = Callable[[int, str, int, int], Tensor]


def fill(
    out: Tensor,
    m: ModelConfig,
    seed: int,
    param: Param,
    start: int,
    draw: Draw = standard_normal,
) -> None:
    """Write elements [start, start + out.numel()) of the parameter's initial value to the 1-D tensor `out`.

    Args:
        param: the parameter. Its name selects the random stream, and `Param.init` the distribution.
        draw: returns N(0, 1) elements, as `standard_normal` does.
    """
    if param.init is Init.ONES:
        out.fill_(1)
    elif param.init is Init.ZEROS:
        out.fill_(0)
    else:
        std = _std(m, param)
        for piece, at in _blocks(out, start):
            piece.copy_(draw(seed, param.name, at, piece.numel()) * std)


def fill_all(
    pieces: Iterable[tuple[Tensor, Param, int]],
    m: ModelConfig,
    seed: int,
    draw: Draw,
    threads: int,
    begin: Callable[[], None] | None = None,
) -> None:
    """Call `fill` for each (out, param, start), block by block in `threads` threads. The number of threads does not
    change the values.

    Args:
        begin: each thread calls it first. None: nothing is called.
    """
    blocks = ((block, param, at) for out, param, start in pieces for block, at in _blocks(out, start))
    lock = Lock()

    def work() -> None:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            out, param, at = block
            fill(out, m, seed, param, at, draw)

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads, "initial-weights", begin) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()  # raises what the thread raised


def _blocks(out: Tensor, start: int) -> Iterable[tuple[Tensor, int]]:
    """Return pairs (elements, offset of the first one), with at most _BLOCK elements each."""
    return ((out[at : at + _BLOCK], start + at) for at in range(0, out.numel(), _BLOCK))


def _std(m: ModelConfig, param: Param) -> float:
    """Return the standard deviation of a parameter's initial values, including its factor from `init_mult`.

    Projections into the residual stream are scaled by 1 / sqrt(2 layers) (GPT-2, Radford et al., 2019). With
    `mup_base`, matrices are scaled by the width as in muP (Yang et al., 2022, arXiv:2203.03466, table 3)."""
    std = m.initializer_range / (math.sqrt(2 * m.num_hidden_layers) if param.init is Init.TO_STREAM else 1)
    width = 1.0 if m.mup_base is None else m.hidden_size / m.mup_base
    std *= width ** -_WIDTH_POWER[param.role]
    return family_of(m).init_std(m, param.name, std) * factor_of(m.init_mult, param.name)
