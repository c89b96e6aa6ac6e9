"""The parts of a mixture of experts on one device, and what is refused."""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from ndtrain.config import ConfigError, ModelConfig, load_config, resolve
from ndtrain.device.kind import meta_stands_for
from ndtrain.model import Transformer, flops, params, tensor_dims
from ndtrain.model.block import grouped_linear, wide_linear
from ndtrain.model.families.hf_config import to_hf
from ndtrain.model.moe import permutation
from ndtrain.model.moe.exchange import ExpertRows
from ndtrain.model.moe.losses import balance_loss, load_entropy, load_max_over_mean, with_gradient_of, z_loss
from ndtrain.model.moe.permutation import Permutation, combine, permute
from ndtrain.model.moe.router import sigmoid_top_k, softmax_top_k
from ndtrain.model.transformer import fused_names
from ndtrain.parallel.linear.accumulator import FusedWeights, GradAccumulator
from ndtrain.parallel.linear.grouped import serves_grouped, sum_of_products
from ndtrain.parallel.linear.ops import LinearOps
from ndtrain.parallel.recompute import SavedOps

N, K, X, E, INNER = 7, 2, 5, 8, 12


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def routing():
    """Expert 3 gets no token."""
    logits = drawn(N, X).index_fill(1, torch.tensor([3]), -50.0)
    return softmax_top_k(logits, K, renormalise=True)


def test_permute_and_combine_equal_loop_over_tokens():
    """Outputs equal a loop over tokens, and gradients equal autograd through it."""
    weights, experts = routing()
    x, scale = drawn(N, E).requires_grad_(), drawn(X, E)
    p = Permutation.of(experts, X)
    rows = permute(x, p)
    of_row = torch.arange(X).repeat_interleave(p.counts)
    y = combine(rows * scale[of_row], weights, p)
    expected = torch.stack([sum(weights[n, k] * scale[experts[n, k]] for k in range(K)) for n in range(N)]) * x
    assert p.counts.tolist() == [(experts == e).sum() for e in range(X)] and p.counts[3] == 0
    torch.testing.assert_close(y, expected)
    seed = drawn(N, E)
    (got,), (want,) = (torch.autograd.grad(out, x, seed) for out in (y, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16])
def test_combine_in_parts_equals_autograd(precision, monkeypatch):
    """Outputs and both gradients, in several parts; rows narrower than the weights are widened first."""
    monkeypatch.setattr(permutation, "_CACHED", 3 * E)
    p = Permutation.of(routing().experts, X)
    weights = drawn(N, K).to(torch.promote_types(precision, torch.float32)).requires_grad_()
    y, seed = drawn(N * K, E).to(precision).requires_grad_(), drawn(N, E).to(precision)
    expected = (y[p.rows] * weights[..., None]).sum(1).to(precision)
    got = combine(y, weights, p)
    torch.testing.assert_close(got, expected)
    assert got.dtype == precision
    made, wanted = (torch.autograd.grad(out, (y, weights), seed) for out in (got, expected))
    torch.testing.assert_close(made, wanted)


def test_sum_of_products_equals_sum_over_experts():
    """An expert without rows has no products."""
    sizes = [3, 0, 4]
    rows = ExpertRows.of(torch.tensor(sizes), 7)
    xs, ws = [drawn(7, E), drawn(7, INNER)], [drawn(3, E, 5), drawn(3, INNER, 5)]
    each = [sum(x.split(sizes)[i] @ w[i] for x, w in zip(xs, ws, strict=True)) for i in range(3)]
    torch.testing.assert_close(sum_of_products(xs, ws, rows), torch.cat(each))


def test_permutation_keeps_token_order_within_expert():
    _, experts = routing()
    p = Permutation.of(experts, X)
    for of_expert in (p.slots // K).split(p.counts.tolist()):
        assert of_expert.tolist() == sorted(of_expert.tolist())


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_top_k_equals_hand_calculation(renormalise):
    weights, experts = softmax_top_k(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), 2, renormalise)
    e = torch.tensor([3.0, 2.0]).exp()
    total = e.sum() if renormalise else torch.tensor([1.0, 3.0, 2.0, 0.0]).exp().sum()
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], e / total)


GROUPED = ModelConfig(
    model_type="deepseek_v3", num_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=2.5, moe_intermediate_size=20, n_shared_experts=1, kv_lora_rank=10, qk_nope_head_dim=4,
    qk_rope_head_dim=8, v_head_dim=6,
)  # fmt: skip


def in_groups(logits: torch.Tensor, bias: torch.Tensor | None, m: ModelConfig = GROUPED):
    rest = m.num_experts_per_tok, m.n_group, m.topk_group, m.norm_topk_prob, m.routed_scaling_factor
    return sigmoid_top_k(logits, *rest, bias)


@pytest.mark.parametrize("biased", [False, True])
def test_sigmoid_top_k_equals_router_of_transformers(biased):
    """The biases are large enough to change some choices. The weights do not contain them."""
    hf = transformers.AutoConfig.for_model(**to_hf(GROUPED))
    theirs = modeling_deepseek_v3.DeepseekV3TopkRouter(hf)
    x, bias = drawn(50, hf.hidden_size).float(), drawn(12).float() * biased
    with torch.no_grad():
        theirs.weight.copy_(drawn(12, hf.hidden_size) * 0.1)
        theirs.e_score_correction_bias.copy_(bias)
    logits, weights, experts = theirs(x)
    ours = in_groups(logits, bias if biased else None)
    dense = lambda w, e: torch.zeros(50, 12).scatter(1, e, w)
    torch.testing.assert_close(dense(ours.weights, ours.experts), dense(weights, experts))
    assert biased == (in_groups(logits, None).experts.sort().values != ours.experts.sort().values).any()


def test_group_bias_changes_choice_but_not_weights():
    """Group 1 has the two best experts after its bias, though group 0 has the single best one."""
    m = replace(GROUPED, num_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, norm_topk_prob=False)
    logits, bias = torch.tensor([[3.0, -3.0, 0.5, 0.4]]), torch.tensor([0.0, 0.0, 0.2, 0.2])
    assert in_groups(logits, None, m).experts.tolist() == [[2, 3]]  # 0.62 + 0.60 against 0.95 + 0.05
    weights, experts = in_groups(logits + torch.tensor([0, 3.0, 0, 0]), bias, m)
    assert experts.tolist() == [[2, 3]]  # 1.02 + 0.80 against 0.95 + 0.50
    torch.testing.assert_close(weights, 2.5 * logits[:, 2:].sigmoid())
    assert in_groups(logits + torch.tensor([0, 3.0, 0, 0]), None, m).experts.tolist() == [[0, 1]]


def test_wide_linear_computes_logits_in_fp32():
    x, w = drawn(3, E).bfloat16(), drawn(X, E).bfloat16()
    logits = wide_linear(x, w)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(x.float(), w.float()))


# ------------------------------------------------------------------------------------------------------------ balance


def test_selection_bias_changes_choice_but_not_weights():
    logits, bias = torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([0.0, 0.0, -9.0, 0.0])
    weights, experts = softmax_top_k(logits, 2, renormalise=False, bias_X=bias)
    assert experts.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, experts))


def test_load_statistics_equal_hand_calculation():
    """The largest over the mean, and the entropy over its largest value: of equal loads, of two experts that have all,
    and of one that has all."""
    counts = torch.tensor([[4.0, 4, 4, 4], [8, 8, 0, 0], [0, 16, 0, 0]], dtype=torch.float64)
    assert load_max_over_mean(counts).tolist() == [1, 2, 4]
    torch.testing.assert_close(load_entropy(counts), torch.tensor([1, 0.5, 0], dtype=torch.float64))


def test_with_gradient_of_adds_gradient_but_no_value():
    x, y = drawn(N, K).requires_grad_(), drawn(N).requires_grad_()
    out = with_gradient_of(x, 3 * y.square().sum())
    assert torch.equal(out, x)
    dx, dy = torch.autograd.grad((out * 2).sum(), [x, y])
    torch.testing.assert_close(dx, torch.full_like(x, 2))
    torch.testing.assert_close(dy, 6 * y.detach())


def test_balance_and_z_loss_of_even_loads():
    """K for each token; and the square of log X where all logits are 0."""
    even, logits = torch.full((N, X), 1 / X, dtype=torch.float64), torch.zeros(N, X, dtype=torch.float64)
    assert balance_loss(even[0] * K, even).item() == pytest.approx(K * N)
    assert z_loss(logits).item() == pytest.approx(N * math.log(X) ** 2)


# --------------------------------------------------------------------------------------------------- grouped products


def stacked(dtype: torch.dtype, outs: tuple[int, ...]) -> tuple[FusedWeights, list[list[nn.Parameter]]]:
    """Matrices of each of X experts as one, and of each kind those of all experts, which are views."""
    rows = outs * X
    whole = nn.Parameter(drawn(sum(rows), E).to(dtype))
    whole.grad = torch.full(whole.shape, 3.0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    matrices = [nn.Parameter(w) for w in whole.detach().split(rows)]
    return FusedWeights(whole, rows), [matrices[kind :: len(outs)] for kind in range(len(outs))]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kinds", [1, 2], ids=["apart", "together"])
@pytest.mark.parametrize("out", [INNER, 6], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_grouped_linear_equals_loop_over_experts(dtype, out, kinds, deferred):
    """Outputs and gradients equal autograd's through the plain loop, of two matrices of each expert in two stacks or in
    one. A fresh gradient is overwritten, and the gradient of an earlier microbatch is added to."""
    counts = torch.tensor([4, 0, 1, 3, 0])
    accumulator, stacks = GradAccumulator(), [stacked(dtype, (out,) * kinds) for _ in range(2 // kinds)]
    fused = {of_kinds[0][0]: stack for stack, of_kinds in stacks}
    accumulator.open([stack.weight for stack in fused.values()])
    grad_of = {}  # of each matrix, in the gradient of its stack
    for stack, of_kinds in stacks:
        matrices = chain.from_iterable(zip(*of_kinds, strict=True))
        grad_of |= zip(matrices, stack.weight.grad.split(stack.rows), strict=True)
    ops, weights = LinearOps(accumulator, SavedOps(), fused), [each for _, of_kinds in stacks for each in of_kinds]
    x = drawn(8, E).to(dtype).requires_grad_()
    seeds = [drawn(8, out).to(dtype), drawn(8, out).to(dtype).cos()]
    later = []
    for times in (1, 2):
        for make, is_reference in ((ops.grouped_linear, False), (grouped_linear, True)):
            ys = make(x, ExpertRows.of(counts, 8), weights)
            if is_reference:
                dx, *dws = torch.autograd.grad(ys, [x, *weights[0], *weights[1]], seeds)
                break
            with accumulator.deferred(later) if deferred else torch.enable_grad():
                (got,) = torch.autograd.grad(ys, x, seeds)
            outputs = ys
        while later:
            later.pop(0)()
        for y, expected in zip(outputs, ys, strict=True):
            torch.testing.assert_close(y, expected)
        torch.testing.assert_close(got, dx)
        for w, dw in zip(chain.from_iterable(weights), dws, strict=True):
            torch.testing.assert_close(grad_of[w], times * dw)


FACTORS = {  # dtype, elements before it in its buffer, columns -> does the kernel take it
    "aligned": (torch.bfloat16, 8, 16, True),
    "fp32": (torch.float32, 8, 16, False),
    "a start within 16 bytes": (torch.bfloat16, 12, 16, False),
    "rows that start within 16 bytes": (torch.bfloat16, 8, 12, False),
}


@pytest.mark.parametrize("name", FACTORS)
def test_serves_grouped_requires_alignment(name):
    dtype, before, columns, serves = FACTORS[name]
    factor = lambda: torch.empty(before + 4 * columns, dtype=dtype, device="meta")[before:].view(4, columns)
    assert not serves_grouped(factor())
    with meta_stands_for("cuda"):
        assert serves_grouped(factor()) is serves


# ------------------------------------------------------------------------------------------------------ declarations

SHAPE = ModelConfig(
    model_type="qwen2_moe", vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=5, shared_expert_intermediate_size=7, mlp_only_layers=[1],
)  # fmt: skip
ATTENTION = 2 * 192 + 2 * 96  # weights of q and o, 8 x 24 each, k and v, 8 x 12


def test_flops_count_active_and_memory_all_experts():
    """Two layers have 4 experts of 3 x 8 x 5 weights and a router of 4 x 8; a token goes to 2 experts. They also have
    a shared expert of 3 x 8 x 7 with a gate of 8. The third layer is dense, 3 x 8 x 12."""
    sparse, dense = ATTENTION + 2 * 120 + 32 + 168 + 8, ATTENTION + 288
    assert flops.matmul_parameters(SHAPE) == 2 * sparse + dense + 80
    assert flops.flops_per_token(SHAPE, 100) == 6 * (2 * sparse + dense + 80) + 12 * 3 * 4 * 6 * 100
    vectors = 3 * (16 + 24 + 2 * 12) + 8
    assert flops.parameter_count(SHAPE) == 2 * (sparse + 2 * 120) + dense + 2 * 80 + vectors
    with torch.device("meta"):
        assert sum(p.numel() for p in Transformer(SHAPE).parameters()) == flops.parameter_count(SHAPE)


def test_hardware_flops_count_dense_and_sparse_layers():
    again = flops.hardware_flops_per_token(SHAPE, 100, [frozenset()] * 3) - flops.flops_per_token(SHAPE, 100)
    assert again == sum(flops.block_flops(SHAPE, 100, i) for i in range(3))
    assert flops.block_flops(SHAPE, 100, 0) != flops.block_flops(SHAPE, 100, 1)
    ahead = flops.hardware_flops_per_token(SHAPE, 100, [None] * 3, look_ahead=True) - flops.flops_per_token(SHAPE, 100)
    assert ahead == again, "a look ahead is a forward of every block too"


def test_expert_unit_orders_matrices_by_input():
    table = params(SHAPE)
    names = [n for n, p in table.items() if p.unit == "model.layers.2.mlp.experts"]
    of_one_input = ("gate_proj", "up_proj"), ("down_proj",)
    stacks = [[f"model.layers.2.mlp.experts.{x}.{p}.weight" for x in range(4) for p in ps] for ps in of_one_input]
    assert names == stacks[0] + stacks[1]
    assert {tuple(stacks[0]), tuple(stacks[1])} <= set(fused_names(SHAPE))
    assert table["model.layers.2.mlp.shared_expert.up_proj.weight"].unit == "model.layers.2"


# ------------------------------------------------------------------------------------------------------------ refusals

LATENT = [
    "model_type=deepseek_v3", "num_key_value_heads=4", "n_shared_experts=1", "kv_lora_rank=10", "qk_nope_head_dim=4",
    "qk_rope_head_dim=8", "v_head_dim=6",
]  # fmt: skip
REFUSED = {
    "more choices than experts": (["num_experts_per_tok=9"], ["num_experts_per_tok=9", "num_experts=8"]),
    "no number of experts": (["num_experts=null"], ["model.num_experts is missing", "qwen3_moe"]),
    "no experts": (["num_experts=0"], ["model.num_experts=0", "at least 1"]),
    "a layer that is not there": (["mlp_only_layers=[2]"], ["mlp_only_layers", "layer 2", "0 to 1"]),
    "a shared expert of Qwen3": (["shared_expert_intermediate_size=8"], ["shared_expert", "qwen3_moe"]),
    "experts of Llama": (["model_type=llama"], ["model.num_experts=8", "llama"]),
    "a shared expert of no size": (
        ["model_type=qwen2_moe"], ["shared_expert_intermediate_size is missing", "qwen2_moe"],
    ),
    "placement in Mixtral": (
        ["model_type=mixtral", "moe_intermediate_size=null", "norm_topk_prob=false", "mlp_only_layers=[0]"],
        ["mlp_only_layers=[0]", "mixtral"],
    ),
    "a dense family's field": (["kv_lora_rank=8"], ["model.kv_lora_rank=8", "qwen3_moe", "remove it"]),
    "unequal groups": ([*LATENT, "n_group=3"], ["n_group=3", "num_experts=8", "equal groups"]),
    "groups of one": ([*LATENT, "n_group=8"], ["n_group=8", "two or more"]),
    "more groups than there are": ([*LATENT, "n_group=2", "topk_group=3"], ["topk_group=3", "n_group=2"]),
    "choices beyond the chosen groups": (
        [*LATENT, "n_group=4", "num_experts_per_tok=3"], ["num_experts_per_tok=3", "2 experts", "topk_group=1"],
    ),
    "more dense layers than layers": (
        [*LATENT, "first_k_dense_replace=3"], ["first_k_dense_replace=3", "num_hidden_layers=2"],
    ),
    "clipped to nothing": (
        ["model_type=olmoe", "moe_intermediate_size=null", "clip_qkv=0"], ["model.clip_qkv=0.0", "positive, or null"],
    ),
    "a scale of nothing": ([*LATENT, "routed_scaling_factor=0"], ["routed_scaling_factor=0.0", "positive"]),
    "no latent": ([*LATENT, "kv_lora_rank=null"], ["model.kv_lora_rank is missing", "deepseek_v3"]),
    "another size of head": ([*LATENT, "head_dim=8"], ["head_dim=8", "= 12", "remove it"]),
    "fewer keys than heads": ([*LATENT, "num_key_value_heads=2"], ["num_key_value_heads=2", "num_attention_heads=4"]),
    "values wider than keys": ([*LATENT, "v_head_dim=13"], ["v_head_dim=13", "= 12"]),
    "biases by distance": ([*LATENT, "alibi=true"], ["alibi=true", "deepseek_v3"]),
    "a mistyped key": (["num_expert=4"], ["num_expert", "num_experts"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_moe_model_is_refused(name):
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(["recipe=moe_debug", *(f"model.{c}" for c in changes)]), 1)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in said), line


def test_to_hf_writes_dense_size_for_null_expert_size():
    """transformers would use the default of its class instead."""
    model = resolve(load_config(["recipe=moe_debug", "model.moe_intermediate_size=null"]), 1).model
    assert to_hf(model)["moe_intermediate_size"] == model.intermediate_size


def test_moe_model_of_only_dense_layers_has_no_experts():
    m = replace(SHAPE, mlp_only_layers=[0, 1, 2])
    assert not any("experts" in n for n in tensor_dims(m))
