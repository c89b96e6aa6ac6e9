"""QK-Clip on meshes, against one process with explicit attention scores and torch.optim.AdamW."""

from functools import cache

import pytest
import torch

from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import Ops, Transformer, params
from ndtrain.model.init import fill
from ndtrain.model.vocabulary import IGNORE
from ndtrain.optim import Update, learning_rate
from ndtrain.parallel.build import build_stages, initialise
from tests.lib.parity import FP64, assemble, distance, make_batches, rank_run, rank_state
from tests.lib.ranks import run_ranks

STEPS = 3
COMMON = [
    "model.vocab_size=101", "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2",
    "model.initializer_range=0.3", "train.seq_len=16", "train.loss_chunk=10", "train.global_batch=8",
    f"train.steps={STEPS}", "optim.lr=1e-2", "optim.clip=0.5",
]  # fmt: skip
LLAMA = [
    "model.num_attention_heads=8", "model.num_key_value_heads=2", "model.attention_bias=true", "optim.qk_clip=12",
]  # fmt: skip
LATENT = [
    "model.model_type=deepseek_v3", "model.num_attention_heads=4", "model.num_key_value_heads=4",
    "model.q_lora_rank=12", "model.kv_lora_rank=8", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4",
    "model.v_head_dim=6", "model.num_experts=4", "model.num_experts_per_tok=2", "model.first_k_dense_replace=2",
    "model.n_shared_experts=1", "optim.qk_clip=5",
]  # fmt: skip


class Explicit:
    """An attention core that keeps its scores' largest element and largest log-sum-exp, for each layer and head."""

    def __init__(self):
        self.scores: list[torch.Tensor] = []
        self.measures: list[torch.Tensor] = []

    def __call__(self, q, k, v, ctx, largest=None):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        self.scores.append(scores.detach().amax((0, 2, 3)))
        self.measures.append(scores.detach().logsumexp(-1).amax((0, 2)))
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def groups_of(cfg) -> list[list[tuple[str, slice, float]]]:
    """For the heads that share a key: (projection, rows, power of the factor)."""
    m, D = cfg.model, cfg.model.head_dim
    if m.model_type == "llama":
        each, kinds = m.num_attention_heads // m.num_key_value_heads, ("weight", "bias")
        queries = lambda g, kind: (f"self_attn.q_proj.{kind}", slice(g * each * D, (g + 1) * each * D), 0.5)
        keys = lambda g, kind: (f"self_attn.k_proj.{kind}", slice(g * D, (g + 1) * D), 0.5)
        return [[of(g, kind) for of in (queries, keys) for kind in kinds] for g in range(m.num_key_value_heads)]
    plain, kv = m.qk_nope_head_dim, m.qk_nope_head_dim + m.v_head_dim
    queries = f"self_attn.{'q_proj' if m.q_lora_rank is None else 'q_b_proj'}.weight"
    return [
        [
            (queries, slice(h * D, h * D + plain), 0.5),
            (queries, slice(h * D + plain, (h + 1) * D), 1.0),
            ("self_attn.kv_b_proj.weight", slice(h * kv, h * kv + plain), 0.5),
        ]
        for h in range(m.num_attention_heads)
    ]


def scale(named: dict[str, torch.Tensor], cfg, measures: list[torch.Tensor]) -> int:
    """Clips the heads of all layers. Returns the number of heads above the limit."""
    groups, limit, above = groups_of(cfg), cfg.optim.qk_clip, 0
    for i, measure in enumerate(measures):
        above += int((measure > limit).sum())
        for parts, largest in zip(groups, measure.view(len(groups), -1).amax(1).tolist(), strict=True):
            for name, rows, power in parts if largest > limit else ():
                named[f"model.layers.{i}.{name}"].data[rows] *= (limit / largest) ** power
    return above


@cache
def reference(model: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """(weights after the steps of the plain model with autograd, the numbers of each step)."""
    cfg = resolve(load_config([*COMMON, *FP64, *model, "train.micro_batch=8"]), 1)
    mesh, o, core = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")), cfg.optim, Explicit()
    plain, table = Transformer(cfg.model).double(), params(cfg.model)
    plain.use(Ops(core=core))
    named = dict(plain.named_parameters())
    for name, p in named.items():
        fill(p.data.view(-1), cfg.model, cfg.run.seed, table[name], 0)
    groups = [{"params": [p], "weight_decay": o.weight_decay * (p.ndim > 1)} for p in named.values()]
    adamw, numbers = torch.optim.AdamW(groups, betas=tuple(o.betas), eps=o.eps), []
    for step in range(1, STEPS + 1):
        core.measures.clear()
        (batch,) = make_batches(cfg, mesh, step, "uneven")
        loss = plain(batch.tokens, batch.labels) / (batch.labels != IGNORE).sum()
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), o.clip)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(o, step, cfg.train.steps)
        adamw.step()
        above = scale(named, cfg, core.measures)
        numbers.append({"qk_clip/largest_logit": float(torch.stack(core.measures).max()), "qk_clip/heads": above})
    return {name: p.data for name, p in named.items()}, numbers


CASES = {
    "one rank": (1, LLAMA, []),
    "tp2 cp2 ring": (4, LLAMA, ["mesh.tp=2", "mesh.cp=2", "recompute=selective"]),
    "cp2 ulysses": (2, LLAMA, ["mesh.cp=2", "cp.kind=ulysses"]),
    "cp4 both": (4, LLAMA, ["mesh.cp=4", "cp.ulysses=2", "recompute=every"]),
    "tp4 shares keys": (4, LLAMA, ["mesh.tp=4", "tp.sequence_parallel=false"]),
    "pp2 fsdp2": (4, LLAMA, ["mesh.pp=2", "mesh.fsdp=2", "schedule=zb_h1", "recompute=full"]),
    "dp2 zero1 offload": (2, LLAMA, ["mesh.dp=2", "mesh.zero=1", "optim.offload=true"]),
    "fsdp2 tp2 cp2": (8, LLAMA, ["mesh.fsdp=2", "mesh.tp=2", "mesh.cp=2", "mesh.zero=3"]),
    "compiled": (1, LLAMA, ["train.compile=true"]),
    "compiled cp2": (2, LLAMA, ["mesh.cp=2", "train.compile=true"]),
    "latent": (1, LATENT, []),
    "latent keys alone": (2, [*(o for o in LATENT if "q_lora" not in o), "optim.qk_clip=7"], ["mesh.tp=2"]),
    "latent fsdp2 tp2": (4, LATENT, ["mesh.fsdp=2", "mesh.tp=2"]),
    "latent pp2 cp2": (4, LATENT, ["mesh.pp=2", "mesh.cp=2"]),
}
SAMPLED = ("latent fsdp2 tp2",)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.full] * (c not in SAMPLED)) for c in CASES])
def test_weights_equal_explicit_scores_in_one_process(case):
    ranks, model, overrides = CASES[case]
    want, numbers = reference(tuple(model))
    overrides = [*COMMON, *FP64, *model, "train.micro_batch=1", *overrides]
    got = assemble(run_ranks(rank_run, ranks, overrides, "uneven", timeout=600))
    heads = 2 * resolve(load_config(model), 1).model.num_attention_heads
    assert all(0 < n["qk_clip/heads"] < heads for n in numbers), numbers
    for step, expected in enumerate(numbers):
        assert {k: got.balance[step][k] for k in expected} == pytest.approx(expected, rel=1e-9)
    off = {name: distance(got.tensors["weight"][name], tensor) for name, tensor in want.items()}
    worst = max(off, key=off.get)
    assert off[worst] <= 1e-9, f"{worst} is off by {off[worst]:.2e}"


def stages_of(*overrides: str):
    """One layer on one rank."""
    dense = ["model.first_k_dense_replace=1"] if "model.first_k_dense_replace=2" in overrides else []
    cfg = resolve(load_config([*COMMON, *FP64, *overrides, "model.num_hidden_layers=1", *dense]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    return cfg, mesh, stages


@pytest.mark.parametrize("model", [LLAMA, LATENT], ids=["llama", "latent"])
def test_logits_are_multiplied_by_limit_over_measure(model):
    """The update of a step with a learning rate of almost zero changes only the heads above the limit."""
    cfg, mesh, stages = stages_of(*model, "train.micro_batch=8", "optim.lr=1e-200", "optim.weight_decay=0")
    batches, before, after = make_batches(cfg, mesh, 1, "none"), Explicit(), Explicit()
    weights = lambda: {name: x.clone() for _, name, _, _, x in rank_state(stages, [("weight", "master")])}
    logits = lambda core: plain_forward(cfg, weights(), core, batches[0])
    logits(before)
    measure = before.measures[0].view(len(groups_of(cfg)), -1)
    stages.qk_clip.limit = limit = measure.amax(1).mean().item()
    TrainingStep(cfg, mesh, stages).run(1, batches).wait()
    logits(after)
    factor = (limit / measure.amax(1).clamp(min=limit)).repeat_interleave(measure.shape[1])
    assert 0 < (factor < 1).sum() < len(factor)
    torch.testing.assert_close(after.scores[0], before.scores[0] * factor, rtol=1e-10, atol=0)


def plain_forward(cfg, weights: dict[str, torch.Tensor], core: Explicit, batch) -> None:
    plain = Transformer(cfg.model).double()
    plain.use(Ops(core=core))
    for name, p in plain.named_parameters():
        p.data.copy_(weights[name].view_as(p))
    with torch.no_grad():
        plain(batch.tokens, batch.labels)


def test_skipped_step_scales_nothing():
    _, _, stages = stages_of(*LLAMA)
    stages.qk_clip.largest_LH.fill_(100)
    update = lambda found_inf: Update(1, torch.tensor(0.0), 1e-2, torch.tensor(found_inf), None)
    scale_all = lambda update: [stages.qk_clip.scale(u, stages.qk_clip.factors(update)) for u in stages.units.units]
    before = rank_state(stages, [("weight", "master")])
    changed = lambda: {
        name for (*_, old), (_, name, *_, new) in zip(before, rank_state(stages, [("weight", "master")]), strict=True)
        if not torch.equal(old, new)
    }  # fmt: skip
    stages.qk_clip.largest_LH[0, 0] = float("nan")
    scale_all(update(1.0))
    assert not changed()
    stages.qk_clip.largest_LH.fill_(100)
    scale_all(update(0.0))
    assert changed() == {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk"}  # biases are still 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.model_type=qwen3"], "model.model_type=qwen3 normalises queries and keys"),
        (["islands.count=2", "islands.sync=gradients"], "needs the attention logits of all islands"),
        (["optim.qk_clip=0"], "optim.qk_clip=0"),
    ],
)
def test_bad_input_is_one_clear_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve(load_config([*COMMON, *LLAMA, *overrides]), 1)
    assert "\n" not in str(error.value)
