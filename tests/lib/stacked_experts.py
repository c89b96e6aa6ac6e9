"""The experts of `transformers`, which stacks them in memory, under the names of its files, and back."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.families import family_of

_SIGMOID = ("deepseek_v3", "glm4_moe")  # families whose routers score by sigmoids
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
    """Makes a router of `transformers`, which computes in fp32, compute in fp64. The weight of DeepSeek-V3 is opened in
    fp32, whatever the model's precision."""
    router.weight.data = router.weight.data.double()

    def forward(x: Tensor):
        logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
        weights, experts = _by_groups(logits, router, m) if m.model_type in _SIGMOID else _by_softmax(logits, m)
        return logits, weights, experts

    router.forward = forward


def _by_softmax(logits: Tensor, m: ModelConfig) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(m.num_experts_per_tok, dim=-1)
    if m.norm_topk_prob or m.model_type == "mixtral":
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def _by_groups(logits: Tensor, router: torch.nn.Module, m: ModelConfig) -> tuple[Tensor, Tensor]:
    """Token by token, as DeepSeek-V3's report says it."""
    scores, each = logits.sigmoid(), m.num_experts // m.n_group
    chosen = []
    for of_token in (scores + router.e_score_correction_bias).tolist():
        groups = [of_token[g * each : (g + 1) * each] for g in range(m.n_group)]
        best = sorted(range(m.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))[: m.topk_group]
        allowed = [e for e in range(m.num_experts) if e // each in best]
        chosen.append(sorted(allowed, key=lambda e: -of_token[e])[: m.num_experts_per_tok])
    experts = torch.tensor(chosen)
    weights = scores.gather(1, experts)
    if m.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * m.routed_scaling_factor, experts
