"""Hugging Face folders of every family: trained as `transformers` would train them, and opened by it again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from ndtrain.config import ModelConfig
from ndtrain.model import Transformer
from ndtrain.model.families.hf_config import from_hf, read_hf_config
from ndtrain.model.transformer import bias_names
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows
from tests.lib.parity import distance
from tests.lib.ranks import run_ranks
from tests.lib.stacked_experts import as_in_files
from tests.model.test_transformers import lift

SIZES = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
    "use_cache": True,
}  # fmt: skip
LLAMA = SIZES | _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
    "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    "rope_type": "llama3",
}  # fmt: skip
MISTRAL = SIZES | _COMMON | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 24,
}  # fmt: skip
QWEN2 = SIZES | _COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 28, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 16,
    "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4,
    "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
QWEN2_MOE = QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
    "max_window_layers": 21,
    "mlp_only_layers": [], "moe_intermediate_size": 20, "norm_topk_prob": False, "num_experts": 6,
    "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 24, "sliding_window": 32768,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "max_window_layers": 48,
    "mlp_only_layers": [0], "moe_intermediate_size": 20, "norm_topk_prob": True, "num_experts": 6,
    "num_experts_per_tok": 3, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
OLMOE = LLAMA | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "clip_qkv": None, "norm_topk_prob": False,
    "num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4, "output_router_logits": False,
    "pad_token_id": 130, "router_aux_loss_coef": 0.01, "rope_theta": 10000.0,
}  # fmt: skip
MOONLIGHT = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 12, "moe_intermediate_size": 20, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 6, "n_shared_experts": 2, "norm_topk_prob": True, "num_experts_per_tok": 3,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "q_lora_rank": None, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
    "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 8,
}  # fmt: skip
del MOONLIGHT["mlp_bias"]
DEEPSEEK_V3 = MOONLIGHT | {
    "n_group": 3, "n_shared_experts": 1, "num_nextn_predict_layers": 1, "q_lora_rank": 20, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "topk_group": 2,
}  # fmt: skip
del OLMOE["mlp_bias"], OLMOE["pretraining_tp"]
# the fields that each family was published with, in their original spelling, with small sizes
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias", "rope_theta")}
    | {"num_key_value_heads": 4, "attention_dropout": None, "torch_dtype": "float16"},
    "llama3": LLAMA,
    "llama3.1": LLAMA | {"rope_scaling": LLAMA3_ROPE},
    "llama3.2": LLAMA | {"rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "head_dim": 8, "tie_word_embeddings": True},
    "llama-biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": MISTRAL,
    "mistral-nemo": MISTRAL | {"sliding_window": None, "head_dim": 12, "rope_theta": 1000000.0},
    "qwen2": QWEN2,
    "qwen2.5": QWEN2 | {"tie_word_embeddings": True, "use_mrope": False},
    "qwen2-window": QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-biased": QWEN3 | {"attention_bias": True},
    "mixtral": MIXTRAL,
    "qwen2-moe": QWEN2_MOE,
    "qwen3-moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "olmoe-clipped": OLMOE | {"clip_qkv": 0.3},
    "deepseek-v3": DEEPSEEK_V3,
    "moonlight": MOONLIGHT,
}
# with the auxiliary loss of `transformers`, large enough to matter
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
FAMILIES |= {f"{n}-balanced": FAMILIES[n] | BALANCED for n in ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")}
SHARDED = {"llama3.1", "qwen3", "qwen3-moe"}
SAMPLE = {"qwen3-moe-balanced"}  # the rest takes --full
DENSE_MESH = ["mesh.fsdp=2", "mesh.tp=2"]
MOE_MESH = ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2"]
T, STEPS, ROWS = 64, 3, 4


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def from_transformers(folder: Path, name: str) -> None:
    """Writes a random model of a family as `transformers` saves it, but with the config.json it was published with."""
    config = FAMILIES[name]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=draw) + parameter.endswith("norm.weight"))
    model.to(getattr(torch, config["torch_dtype"]))
    for buffer, bias in model.named_buffers():
        if buffer.endswith("e_score_correction_bias"):  # fp32 in every file
            bias.data = 0.1 * torch.randn(bias.shape, generator=draw)
    model.save_pretrained(folder, max_shard_size="20KB" if name in SHARDED else "1GB")
    write(folder, config)


def open_transformers(folder: Path, m: ModelConfig | None = None) -> torch.nn.Module:
    """The `transformers` model in fp64; with `m`, its norms and rotary tables too."""
    options = {"dtype": torch.float64, "attn_implementation": "sdpa", "experts_implementation": "eager"}
    options |= {"output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model.model.embed_tokens.padding_idx = None  # its embedding of a padding token gets no gradient
    if m:
        lift(model, m)
    return model


def train_transformers(model: torch.nn.Module, tokens: np.ndarray, m: ModelConfig) -> tuple[list, list, dict, dict]:
    """Trains a `transformers` model for three steps with torch's AdamW. Returns (losses, auxiliary losses, gradients of
    the first step, weights after the last), by the names of its files."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, aux_losses, gradients = [], [], {}
    more = {"output_router_logits": True} if m.output_router_logits else {}
    for step in range(STEPS):
        starts = [(step * ROWS + i) * T for i in range(ROWS)]
        ids = torch.from_numpy(np.stack([tokens[s : s + T + 1] for s in starts]).astype(np.int64))
        out = model(input_ids=ids[:, :-1], **more)
        loss = cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        aux_loss = out.aux_loss if more else torch.zeros(())
        optimizer.zero_grad()
        (loss + m.router_aux_loss_coef * aux_loss).backward()
        losses.append(loss.item())
        aux_losses.append(aux_loss.item())
        gradients = gradients or as_in_files({n: p.grad.clone() for n, p in model.named_parameters()}, m)
        optimizer.step()
    return losses, aux_losses, gradients, as_in_files({n: p.detach() for n, p in model.named_parameters()}, m)


def tensors(checkpoint: Path, stem: str) -> dict[str, torch.Tensor]:
    return {n: t for path in sorted(checkpoint.glob(f"{stem}*.safetensors")) for n, t in load_file(path).items()}


def worst(ours: dict, theirs: dict, difference: Callable) -> tuple[float, str]:
    assert ours.keys() == theirs.keys()
    return max((difference(ours[n], theirs[n]), n) for n in theirs)


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=[pytest.mark.full] if f not in SAMPLE else []) for f in FAMILIES]
)
def test_training_from_folder_equals_transformers(name, tmp_path):
    """Training on a mesh gives the losses, first gradients and final weights of `transformers` on one process, and
    `transformers` loads the checkpoint."""
    mesh = MOE_MESH if "num_experts_per_tok" in FAMILIES[name] else DENSE_MESH
    source = tmp_path / "source"
    from_transformers(source, name)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (name in SHARDED)
    tokens = np.random.default_rng(0).integers(0, 131, STEPS * ROWS * T + 1)
    tokens.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    args = arguments(
        tmp_path / "run", tmp_path, "data=bin", f"data.path={tmp_path}/tokens.bin", "data.shuffle=false",
        f"init_from={source}", *mesh, "precision.params=fp64", "precision.compute=fp64",
        f"train.steps={STEPS}", f"train.seq_len={T}", f"train.global_batch={ROWS}", "train.micro_batch=1",
        "optim.lr=1e-3", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null", "optim.weight_decay=0.1",
        "optim.betas=[0.9,0.95]", "optim.eps=1e-8", "checkpoint.every=1", f"checkpoint.keep={STEPS}",
    )  # fmt: skip
    ranks = 2 ** sum(not size.startswith("mesh.ep") for size in mesh)
    assert run_ranks(rank_main, ranks, args) == [0] * ranks
    first, last = (checkpoint_of(tmp_path / "run", step) for step in (1, STEPS))
    averages = {n: t for n, t in tensors(first, "optimizer").items() if n.startswith("exp_avg.")}
    gradients = {n.removeprefix("exp_avg."): t / (1 - 0.9) for n, t in averages.items()}
    losses, aux_losses = ([row.get(key, 0.0) for row in rows(tmp_path / "run")] for key in ("loss", "aux_loss"))
    m = from_hf(read_hf_config(source))
    exact = 1e-6 if m.output_router_logits else 1e-9  # `transformers` computes the shares of the auxiliary loss in fp32

    for bound, model in ((1e-6, open_transformers(source)), (exact, open_transformers(source, m))):
        their_losses, their_aux_losses, their_gradients, their_weights = train_transformers(model, tokens, m)
        assert losses[0] == pytest.approx(their_losses[0], abs=bound)
        off, at = worst(gradients, their_gradients, distance)
        assert off < bound, f"gradient of {at} is off by {off:.1e}"
    assert losses == pytest.approx(their_losses, abs=exact)
    assert aux_losses == pytest.approx(their_aux_losses, abs=exact)
    weights, source_weights = tensors(last, "model"), tensors(source, "model")
    assert weights.keys() == source_weights.keys()
    biases = {n: weights.pop(n) for n in bias_names(m) if n in weights}
    assert all(torch.equal(b, source_weights[n]) for n, b in biases.items()), "a model from a folder keeps its biases"
    off, at = worst(weights, their_weights, lambda a, b: (a - b).abs().max().item())
    assert off < exact, f"{at} is off by {off:.1e} after {STEPS} steps"

    assert from_hf(read_hf_config(last)) == m
    ours = Transformer(m).double()
    ours.load_state_dict(weights)
    if biases:
        ours.use_biases(torch.stack(list(biases.values())))
    ids = torch.from_numpy(tokens[None, :T])
    with torch.no_grad():
        assert (ours.logits(ids) - open_transformers(last)(input_ids=ids).logits).abs().max() < 1e-5
