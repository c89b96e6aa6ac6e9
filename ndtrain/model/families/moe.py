"""What a family of mixtures of experts declares, and which of its models are refused."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.moe.router import Routing, softmax_top_k

# how config.json spells the number of experts, which is `num_experts` here
COUNT_SPELLINGS = ("num_experts", "num_local_experts", "n_routed_experts")
# what every family of mixtures has in config.json beside that number
FIELDS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
# for families in which some layers may be dense
PLACEMENT_FIELDS = ("decoder_sparse_step", "mlp_only_layers")
# the fields of ModelConfig that only the families have which name them
OPTIONAL_FIELDS = (
    "num_experts", *FIELDS, *PLACEMENT_FIELDS, "moe_intermediate_size", "norm_topk_prob",
    "shared_expert_intermediate_size", "clip_qkv",
)  # fmt: skip


def renormalised(m: ModelConfig, logits_NX: Tensor, bias_X: Tensor | None) -> Routing:
    """Softmax, top-k, weights that add up to 1."""
    return softmax_top_k(logits_NX, resolved(m.num_experts_per_tok), True, bias_X)


def renormalised_if_asked(m: ModelConfig, logits_NX: Tensor, bias_X: Tensor | None) -> Routing:
    """Softmax, top-k, and what `norm_topk_prob` says."""
    return softmax_top_k(logits_NX, resolved(m.num_experts_per_tok), m.norm_topk_prob, bias_X)


def softmax(logits_NX: Tensor) -> Tensor:
    """The probabilities of the experts."""
    return logits_NX.softmax(-1)


@dataclass(frozen=True)
class MoE:
    """How a family's mixtures of experts are named and routed.

    Attributes:
        count: how its config.json spells the number of experts.
        route: (model, logits [N, X], selection bias [X] or None) -> the chosen experts and their weights.
        module: the name of the mixture in a block.
        projections: the names of an expert's gate, up and down projection.
        shared: whether there is an expert that every token goes to, with a sigmoid as its gate.
        affinities: logits [N, X] -> what the balance loss of a sequence takes for probabilities; they add up to 1.
        bias: the name of a layer's selection bias in its model files; None: they have no place for it.
    """

    count: str
    route: Callable[[ModelConfig, Tensor, Tensor | None], Routing]
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: bool = False
    affinities: Callable[[Tensor], Tensor] = softmax
    bias: str | None = None

    def is_sparse(self, m: ModelConfig, layer: int) -> bool:
        """Whether a layer has experts; the others have a dense MLP."""
        return layer not in m.mlp_only_layers and (layer + 1) % m.decoder_sparse_step == 0

    def dim_sizes(self, m: ModelConfig) -> dict[str, tuple[int, int]]:
        """The sizes of its own named dims."""
        return {
            "experts": (resolved(m.num_experts), 1),
            "expert_mlp": (m.moe_intermediate_size or m.intermediate_size, 1),
            "shared_mlp": (m.shared_expert_intermediate_size or 0, 1),
            "one": (1, 1),
        }

    def refusal(self, m: ModelConfig) -> str | None:
        """Why there is no such model, in one line; None: there is."""
        needed = ("num_experts", "num_experts_per_tok", *(("shared_expert_intermediate_size",) if self.shared else ()))
        for key in needed:
            if getattr(m, key) is None:
                return f"model.{key} is missing: model.model_type={m.model_type} needs it"
        experts, k = resolved(m.num_experts), resolved(m.num_experts_per_tok)
        if k > experts:
            return f"model.num_experts_per_tok={k} exceeds model.num_experts={experts}: lower it"
        if beyond := [i for i in m.mlp_only_layers if not 0 <= i < m.num_hidden_layers]:
            return f"model.mlp_only_layers names layer {beyond[0]}: there are layers 0 to {m.num_hidden_layers - 1}"
        return None
