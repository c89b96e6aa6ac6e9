"""The declaration of a family's mixtures of experts, and the checks of their configuration."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.families.latent import LATENT_FIELDS
from ndtrain.model.moe.router import Routing, sigmoid_top_k, softmax_top_k

# names in config.json of the number of experts, which is `num_experts` here
COUNT_SPELLINGS = ("num_experts", "num_local_experts", "n_routed_experts")
# fields that every family of mixtures has in config.json, in addition to that number
FIELDS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
# for families in which some layers may be dense
PLACEMENT_FIELDS = ("decoder_sparse_step", "mlp_only_layers")
# fields of ModelConfig that only some families have. A family lists its own in `Family.fields`
OPTIONAL_FIELDS = (
    "num_experts", *FIELDS, *PLACEMENT_FIELDS, "moe_intermediate_size", "norm_topk_prob",
    "shared_expert_intermediate_size", "clip_qkv", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
    "routed_scaling_factor", *LATENT_FIELDS,
)  # fmt: skip


def renormalised(m: ModelConfig, logits_NX: Tensor, bias_X: Tensor | None) -> Routing:
    """Choose experts by softmax and top-k, with weights that add up to 1."""
    return softmax_top_k(logits_NX, resolved(m.num_experts_per_tok), True, bias_X)


def renormalised_if_asked(m: ModelConfig, logits_NX: Tensor, bias_X: Tensor | None) -> Routing:
    """Choose experts by softmax and top-k. `norm_topk_prob` decides if the weights add up to 1."""
    return softmax_top_k(logits_NX, resolved(m.num_experts_per_tok), m.norm_topk_prob, bias_X)


def softmax(logits_NX: Tensor) -> Tensor:
    """Return the probabilities of the experts."""
    return logits_NX.softmax(-1)


def sigmoid_scored(m: ModelConfig, logits_NX: Tensor, bias_X: Tensor | None) -> Routing:
    """Choose experts by sigmoid and top-k of the best groups, with `norm_topk_prob` and `routed_scaling_factor`."""
    k, factor = resolved(m.num_experts_per_tok), m.routed_scaling_factor
    return sigmoid_top_k(logits_NX, k, m.n_group, m.topk_group, m.norm_topk_prob, factor, bias_X)


def shares_of_sigmoids(logits_NX: Tensor) -> Tensor:
    """Return the sigmoids of each token's logits, divided by their sum."""
    scores_NX = logits_NX.sigmoid()
    return scores_NX / scores_NX.sum(-1, keepdim=True)


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token goes to.

    Attributes:
        module: the name of its module in the mixture.
        field: the field of the configuration that determines its size.
        size: (model, value of that field) -> its inner size.
        gated: whether its output is multiplied by the sigmoid of a gate.
    """

    module: str
    field: str
    size: Callable[[ModelConfig, int], int]
    gated: bool = False

    def inner(self, m: ModelConfig) -> int:
        """Return its inner size."""
        return self.size(m, getattr(m, self.field) or 0)


@dataclass(frozen=True)
class MoE:
    """How a family's mixtures of experts are named and routed.

    Attributes:
        count: the name of the number of experts in config.json.
        route: (model, logits [N, X], selection bias [X] or None) -> the chosen experts and their weights.
        module: the name of the mixture in a block.
        projections: the names of an expert's gate, up and down projection.
        shared: the expert that every token goes to. None: there is none.
        affinities: logits [N, X] -> the probabilities in the balance loss of a sequence. They add up to 1.
        bias: the name of a layer's selection bias in the family's model files. None: they have no place for it.
    """

    count: str
    route: Callable[[ModelConfig, Tensor, Tensor | None], Routing]
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: SharedExpert | None = None
    affinities: Callable[[Tensor], Tensor] = softmax
    bias: str | None = None

    @property
    def experts(self) -> str:
        """The path of the experts, relative to a block."""
        return f"{self.module}.experts"

    def is_sparse(self, m: ModelConfig, layer: int) -> bool:
        """Return True if a layer has experts. Other layers have a dense MLP."""
        placed = layer not in m.mlp_only_layers and (layer + 1) % m.decoder_sparse_step == 0
        return placed and layer >= m.first_k_dense_replace

    def dim_sizes(self, m: ModelConfig) -> dict[str, tuple[int, int]]:
        """Return the sizes of the named dims that only mixtures have."""
        return {
            "experts": (resolved(m.num_experts), 1),
            "expert_mlp": (m.moe_intermediate_size or m.intermediate_size, 1),
            "shared_mlp": (self.shared.inner(m) if self.shared else 0, 1),
            "one": (1, 1),
        }

    def refusal(self, m: ModelConfig) -> str | None:
        """Return in one line why ndtrain refuses the model, or None if it does not."""
        needed = ("num_experts", "num_experts_per_tok", *((self.shared.field,) if self.shared else ()))
        for key in needed:
            if getattr(m, key) is None:
                return f"model.{key} is missing: model.model_type={m.model_type} needs it"
        experts, k = resolved(m.num_experts), resolved(m.num_experts_per_tok)
        if k > experts:
            return f"model.num_experts_per_tok={k} exceeds model.num_experts={experts}: lower it"
        if reason := _refused_choice(m, experts, k):
            return reason
        if m.first_k_dense_replace > m.num_hidden_layers:
            return (
                f"model.first_k_dense_replace={m.first_k_dense_replace} exceeds "
                f"model.num_hidden_layers={m.num_hidden_layers}: lower it"
            )
        if beyond := [i for i in m.mlp_only_layers if not 0 <= i < m.num_hidden_layers]:
            return f"model.mlp_only_layers names layer {beyond[0]}: there are layers 0 to {m.num_hidden_layers - 1}"
        return None


def _refused_choice(m: ModelConfig, experts: int, k: int) -> str | None:
    """Return why tokens cannot choose their experts with this configuration, or None if they can."""
    each, rest = divmod(experts, m.n_group)
    if rest or (m.n_group > 1 and each < 2):
        return (
            f"model.n_group={m.n_group} must divide model.num_experts={experts} into equal groups of two or more "
            "experts, because the two best give a group's score: change one of them"
        )
    if m.topk_group > m.n_group:
        return f"model.topk_group={m.topk_group} exceeds model.n_group={m.n_group}: lower it"
    if k > m.topk_group * each:
        return (
            f"model.num_experts_per_tok={k} exceeds the {m.topk_group * each} experts of model.topk_group="
            f"{m.topk_group} groups: lower it, or raise model.topk_group"
        )
    return None
