"""Loss and every gradient against `transformers`, with the same weights, in fp64."""

import math

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from ndtrain.config import ModelConfig
from ndtrain.model import Transformer, params
from ndtrain.model.families import family_of
from ndtrain.model.families.hf_config import from_hf, to_hf
from ndtrain.model.init import fill
from ndtrain.model.transformer import bias_names
from ndtrain.model.vocabulary import IGNORE
from tests.lib.stacked_experts import as_in_files, as_in_memory, lift_router

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1,
    "mscale": 1.2, "mscale_all_dim": 0.8,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
MODELS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama3-rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 100},
    "mistral-wide-heads": {"model_type": "mistral", "head_dim": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "sliding_window": 33},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True},
    "qwen3-window": {"model_type": "qwen3", "sliding_window": 33},
    "mixtral": {"model_type": "mixtral", "num_experts": 5, "num_experts_per_tok": 2},
    "mixtral-window": {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100},
    "qwen2-moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, **EXPERTS},
    "qwen2-moe-dense-first": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, "mlp_only_layers": [0], **EXPERTS,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3-moe-renormalised": {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2, **EXPERTS},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.5},
    "deepseek-v3": {"q_lora_rank": 12, "n_group": 3, "topk_group": 2, "rope_scaling": YARN, **LATENT},
    "deepseek-v3-biased": {"q_lora_rank": 12, "attention_bias": True, "rope_interleave": False, **LATENT},
    "moonlight": {"n_shared_experts": 2, "rms_norm_eps": 1e-3, **LATENT},
    "glm4-moe": {
        "model_type": "glm4_moe", "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 1,
        "num_experts": 4, "moe_intermediate_size": 20, "routed_scaling_factor": 2.0, "attention_bias": True,
    },
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip
T = 512


def config(name: str) -> ModelConfig:
    shape = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": T}
    return ModelConfig(initializer_range=0.1, **(shape | heads | MODELS[name]))


def as_drawn(m: ModelConfig) -> dict[str, torch.Tensor]:
    """Selection biases that decide some choices, where a family's files have a place for them."""
    draw = torch.Generator().manual_seed(1)
    names = [n for n, stem in bias_names(m).items() if stem == "model"]
    return {n: 0.1 * torch.randn(m.num_experts, generator=draw) for n in names}


def pair(m: ModelConfig) -> tuple[Transformer, torch.nn.Module]:
    """(ndtrain's model, the `transformers` model), in fp64, with equal weights."""
    ours = Transformer(m, loss_chunk=100).double()
    table = params(m)
    for name, p in ours.named_parameters():
        fill(p.data.view(-1), m, 0, table[name], 0)
        if name.endswith((".bias", "norm.weight")):  # zeros and ones would hide a mistake
            p.data += torch.linspace(-0.2, 0.2, p.numel()).double()
    hf = transformers.AutoConfig.for_model(**to_hf(m))
    theirs = transformers.AutoModelForCausalLM.from_config(
        hf, attn_implementation="sdpa", experts_implementation="eager"
    ).double()
    theirs.model.embed_tokens.padding_idx = None  # a padding token, which OLMoE names by default, has no gradient there
    biases = as_drawn(m)
    if family_of(m).moe and family_of(m).moe.bias:
        ours.use_biases(torch.stack(list(biases.values())))
    missing = theirs.load_state_dict(as_in_memory(ours.state_dict(), m) | biases, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return ours, theirs


def lift(theirs: torch.nn.Module, m: ModelConfig) -> None:
    """Makes the norms, rotary tables and routers of `transformers`, which compute in fp32, compute in fp64."""
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, n=module: (
                x * (x.square().mean(-1, keepdim=True) + n.variance_epsilon).rsqrt() * n.weight
            )
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            lift_router(module, m)
    rotated, factor = m.qk_rope_head_dim or m.head_dim, 1.0
    angles = [m.rope_theta ** (-i / rotated) for i in range(0, rotated, 2)]
    scaling = m.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        angles = [a / scaling["factor"] for a in angles]
    if scaling.get("rope_type") == "llama3":
        angles = [llama3(a, scaling) for a in angles]
    if scaling.get("rope_type") == "yarn":
        angles, factor = yarn(angles, m.rope_theta, scaling)
    inverse = torch.tensor(angles * 2, dtype=torch.float64)
    theirs.model.rotary_emb.forward = lambda x, position_ids: (
        (position_ids[..., None].double() * inverse).cos() * factor,
        (position_ids[..., None].double() * inverse).sin() * factor,
    )


def llama3(angle: float, s: dict) -> float:
    """The rule of the Llama 3.1 model card, by wavelength."""
    wavelength = 2 * math.pi / angle
    if wavelength < s["original_max_position_embeddings"] / s["high_freq_factor"]:
        return angle
    if wavelength > s["original_max_position_embeddings"] / s["low_freq_factor"]:
        return angle / s["factor"]
    smooth = s["original_max_position_embeddings"] / wavelength - s["low_freq_factor"]
    smooth /= s["high_freq_factor"] - s["low_freq_factor"]
    return (1 - smooth) * angle / s["factor"] + smooth * angle


def yarn(angles: list[float], theta: float, s: dict) -> tuple[list[float], float]:
    """The angles of YaRN's section 3.2, by how often a pair turns, and the factor of the table in section 3.3."""
    pairs, original = len(angles), s["original_max_position_embeddings"]
    at = lambda turns: pairs * math.log(original / (turns * 2 * math.pi), theta)
    low, high = max(0, math.floor(at(s.get("beta_fast", 32)))), math.ceil(at(s.get("beta_slow", 1)))
    kept = [1 - min(1, max(0, (i - low) / (high - low))) for i in range(pairs)]
    mscale = lambda of: 1 + 0.1 * of * math.log(s["factor"])
    factor = mscale(s["mscale"]) / mscale(s["mscale_all_dim"]) if "mscale" in s else mscale(1)
    return [a * (k + (1 - k) / s["factor"]) for a, k in zip(angles, kept, strict=True)], factor


EXACT = [pytest.param(name, True, id=f"{name}-lifted") for name in MODELS]
AS_IS = ("llama", "llama3-rope", "linear-rope", "llama-yarn", "qwen3", "olmoe", "qwen2-moe", "deepseek-v3", "glm4-moe")
AS_IT_IS = [
    pytest.param(name, False, marks=[] if name in AS_IS else [pytest.mark.full], id=f"{name}-as-is") for name in MODELS
]


@pytest.mark.parametrize(("name", "lifted"), [*EXACT, *AS_IT_IS])
def test_loss_and_gradients_equal_transformers(name, lifted):
    m = config(name)
    ours, theirs = pair(m)
    if lifted:
        lift(theirs, m)
    bound = 1e-9 if lifted else 2e-6 if m.model_type == "qwen3" else 1e-6  # qwen3 has two more fp32 norms a block
    tokens = torch.randint(0, m.vocab_size, (2, T + 1), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, : T // 3] = IGNORE
    loss = ours(inputs, labels) / (labels != IGNORE).sum()
    loss.backward()
    logits = theirs(input_ids=inputs).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    assert abs(loss.item() - expected.item()) < bound
    assert (ours.logits(inputs) - logits).abs().max() < 10 * bound
    gradients = as_in_files({n: p.grad for n, p in theirs.named_parameters()}, m)
    off = {n: ((p.grad - gradients[n]).norm() / gradients[n].norm()).item() for n, p in ours.named_parameters()}
    worst = max(off, key=off.get)
    assert off[worst] < bound, f"gradient of {worst} is off by {off[worst]:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_to_hf_round_trips_through_transformers(name):
    m = config(name)
    back = from_hf(transformers.AutoConfig.for_model(**to_hf(m)).to_dict(), name=m.name)
    assert to_hf(back) == to_hf(m)
