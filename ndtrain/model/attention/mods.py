"""A user's operations on attention scores (`model.attention`): looks them up, and applies them to a block of scores.

Shape legend: B batch, N query heads, T queries, S keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ndtrain.config import ConfigError, ModelConfig
from ndtrain.config.registry import get
from ndtrain.model.attention.scores import AttentionMod, ScoreMod

_made: dict[tuple[Callable, str], AttentionMod] = {}


def attention_mod(m: ModelConfig) -> AttentionMod | None:
    """Return the mod that `model.attention` names, or None if it names none. Equal configurations share one mod, and
    therefore its compiled kernels.

    Raises:
        ConfigError: no plugin registers the name, or its function does not return an `AttentionMod` with a score or
            mask.
    """
    if m.attention is None:
        return None
    make = get("attention_mod", m.attention)
    key = make, repr(m)
    if key not in _made:
        mod = make(m)
        if not isinstance(mod, AttentionMod) or mod == AttentionMod():
            raise ConfigError(
                f"model.attention={m.attention}: its function must return an AttentionMod with a score or a mask, and "
                f"returned {mod}"
            )
        _made[key] = mod
    return _made[key]


class Places(NamedTuple):
    """The coordinates of a block of scores, as integers that broadcast to [B, N, T, S].

    Attributes:
        batch: rows of the microbatch. head: query heads of the model. query, key: positions in the sequence.
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor

    @classmethod
    def of(cls, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> "Places":
        """Build the coordinates from one vector per dim of the block: [B], [N], [T], [S]."""
        return cls(batch[:, None, None, None], head[:, None, None], query[:, None], key)


def apply_score(score: ScoreMod, s_BNTS: Tensor, places: Places) -> Tensor:
    """Return the changed scores as a contiguous tensor."""
    return score(s_BNTS, *places).to(s_BNTS.dtype).expand_as(s_BNTS).contiguous()


def score_gradient(score: ScoreMod, s_BNTS: Tensor, places: Places, grad_BNTS: Tensor) -> Tensor:
    """Return the gradient of the scores before `score`, given the gradient of the scores after it."""
    with recording_autograd():
        before = s_BNTS.detach().requires_grad_()
        after = score(before, *places)
        if not after.requires_grad:  # the changed score does not depend on the score
            return torch.zeros_like(grad_BNTS)
        after = after.to(grad_BNTS.dtype).expand_as(grad_BNTS)
        return torch.autograd.grad(after, before, grad_BNTS)[0]


@contextmanager
def recording_autograd() -> Iterator[None]:
    """Make autograd record within the context, even inside a custom op, where PyTorch excludes autograd."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_KEYS = torch._C.DispatchKey
_AUTOGRAD_KEYS = (
    _KEYS.AutogradFunctionality,
    _KEYS.AutogradOther,
    _KEYS.AutogradCPU,
    _KEYS.AutogradCUDA,
    _KEYS.ADInplaceOrView,
)
