"""The experts of `transformers`, which stacks them in memory, under the names of its files, and back."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.families import family_of

_MIXTURE = ".mlp."  # in memory, whatever the files say


def as_in_files(tensors: dict[str, Tensor], m: ModelConfig) -> dict[str, Tensor]:
    """Parameters of a `transformers` model, or their gradients, by the names of its files."""
    moe, out = family_of(m).moe, {}
    if moe is None:
        return tensors
    gate, up, down = moe.projections
    for name, t in tensors.items():
        path, _, leaf = name.replace(_MIXTURE, f".{moe.module}.").rpartition(".")
        parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(leaf) if path.endswith(".experts") else None
        for x in range(m.num_experts if parts else 0):
            pieces = t[x].chunk(len(parts))
            out |= {f"{path}.{x}.{part}.weight": piece for part, piece in zip(parts, pieces, strict=True)}
        if not parts:
            out[f"{path}.{leaf}"] = t
    return out


def as_in_memory(tensors: dict[str, Tensor], m: ModelConfig) -> dict[str, Tensor]:
    """The reverse of `as_in_files`."""
    moe = family_of(m).moe
    if moe is None:
        return tensors
    gate, up, down = moe.projections
    out, experts = {}, {}
    for name, t in tensors.items():
        path, _, rest = name.replace(f".{moe.module}.", _MIXTURE).partition(".experts.")
        if rest:
            experts.setdefault(path, {})[rest] = t
        else:
            out[path] = t
    for path, of_layer in experts.items():
        whole = lambda x, *parts, of_layer=of_layer: torch.cat([of_layer[f"{x}.{p}.weight"] for p in parts])
        every = range(m.num_experts)
        out[f"{path}.experts.gate_up_proj"] = torch.stack([whole(x, gate, up) for x in every])
        out[f"{path}.experts.down_proj"] = torch.stack([whole(x, down) for x in every])
    return out


def lift_router(router: torch.nn.Module, m: ModelConfig) -> None:
    """Makes a router of `transformers`, which computes in fp32, compute in fp64."""

    def forward(x: Tensor):
        logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
        weights, experts = logits.softmax(-1).topk(m.num_experts_per_tok, dim=-1)
        if m.norm_topk_prob or m.model_type == "mixtral":
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    router.forward = forward
