"""The learning-rate schedules and the sharded update, against PyTorch's own pieces."""

import pytest
import torch

from ndtrain.config import OptimConfig, load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import Transformer, params
from ndtrain.model.init import fill
from ndtrain.model.vocabulary import IGNORE
from ndtrain.optim import OptimTensor, PerTensorOptimizer, StateSpec, Update, learning_rate
from ndtrain.parallel.build import build_stages
from tests.lib.parity import FP64, SHAPE, make_batches, train


def test_learning_rate_follows_each_schedule():
    rate = lambda step, **cfg: learning_rate(OptimConfig(lr=1.0, min_lr=0.1, **cfg), step, 100)
    assert [rate(s, schedule="constant", warmup=4) for s in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rate(55, schedule="linear", warmup=10) == pytest.approx(0.55)
    assert rate(55, schedule="cosine", warmup=10) == pytest.approx(0.55)
    assert rate(100, schedule="cosine") == pytest.approx(0.1)
    assert rate(200, schedule="cosine") == pytest.approx(0.1), "beyond its end the schedule stays down"
    assert rate(25, schedule="linear", decay_steps=50) == pytest.approx(0.55)
    assert [rate(s, schedule="wsd", wsd_decay=0.2) for s in (1, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.55, 0.1])


# of a parameter that two patterns match, the last holds
MULTS = [
    "optim.lr_mult={*.down_proj.weight:4,model.layers.1.*:0.25,*norm.weight:2}",
    "optim.wd_mult={model.embed_tokens.weight:0,*.q_proj.weight:3,*norm.weight:5}",
]

OTHER_MESHES = [
    ["mesh.tp=2", "model.num_key_value_heads=2"],
    ["mesh.pp=2"],
    ["mesh.fsdp=2", "mesh.zero=1"],
    ["mesh.fsdp=2", "optim.offload=true"],
]


def group(name: str, ndim: int, o: OptimConfig, mults: bool) -> dict[str, float]:
    """The learning rate's factor and the weight decay of a parameter, without patterns."""
    decay, down, norm = o.weight_decay if ndim > 1 else 0.0, "down_proj" in name, "norm" in name
    if not mults:
        return {"factor": 1, "weight_decay": decay}
    lr_mult = 2 if norm else 0.25 if "layers.1." in name else 4 if down else 1
    return {"factor": lr_mult, "weight_decay": decay * (0 if "embed" in name else 3 if "q_proj" in name else 1)}


@pytest.mark.parametrize(
    ("mesh", "clip", "mults"),
    [
        (["mesh.fsdp=2"], "0.5", False),
        (["mesh.fsdp=2"], "null", True),
        *(pytest.param(mesh, "0.5", True, marks=pytest.mark.full) for mesh in OTHER_MESHES),
    ],
)
def test_three_steps_equal_plain_pytorch_loop(mesh, clip, mults):
    """Weights after three steps of the plain model with autograd, clip_grad_norm_ and AdamW with its groups."""
    overrides = [*SHAPE, *FP64, "train.global_batch=8", "train.micro_batch=2", f"optim.clip={clip}"]
    overrides += MULTS if mults else []
    ours = train(2, [*overrides, *mesh], "uneven")
    same = [o for o in mesh if o.startswith("model.")]
    cfg = resolve(load_config([*overrides, *same, "train.micro_batch=8"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    model = Transformer(cfg.model).double()
    table = params(cfg.model)
    for name, p in model.named_parameters():
        fill(p.data.view(-1), cfg.model, cfg.run.seed, table[name], 0)
    o = cfg.optim
    groups = [{"params": [p], **group(name, p.ndim, o, mults)} for name, p in model.named_parameters()]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=tuple(o.betas), eps=o.eps)
    for step in range(1, 4):
        (batch,) = make_batches(cfg, mesh, step, "uneven")
        loss = model(batch.tokens, batch.labels) / (batch.labels != IGNORE).sum()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip or float("inf"))
        for of_group in adamw.param_groups:
            of_group["lr"] = of_group["factor"] * learning_rate(o, step, cfg.train.steps)
        adamw.step()
        assert ours.losses[step - 1] == pytest.approx(loss.item(), rel=1e-12)
        assert ours.norms[step - 1] == pytest.approx(norm.item(), rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours.tensors["weight"][name], p.data, rtol=1e-10, atol=1e-12)


class Descent(PerTensorOptimizer):
    @classmethod
    def state_spec(cls, cfg: OptimConfig) -> tuple[StateSpec, ...]:
        return ()

    def update(self, tensor: OptimTensor, lr: float, step: int) -> None:
        tensor.weight.sub_(lr * tensor.grad)


def test_optimizer_step_uses_lr_mult_of_tensor():
    weights = [torch.zeros(2), torch.zeros(2)]
    tensors = [OptimTensor(w, torch.ones(2), {}, 0.0, lr_mult=m) for w, m in zip(weights, (1.0, 4.0), strict=True)]
    Descent(OptimConfig()).step(tensors, Update(1, torch.zeros(()), 0.25, torch.zeros(()), None))
    assert torch.equal(torch.stack(weights), torch.tensor([[-0.25, -0.25], [-1.0, -1.0]]))


def test_the_norm_of_a_large_fp32_gradient_is_exact():
    """PyTorch's own, over ten million elements at once, is off by 5e-4 here."""
    shape = [
        "model.hidden_size=256", "model.intermediate_size=1024", "model.num_hidden_layers=4", "model.vocab_size=8192"
    ]  # fmt: skip
    cfg = resolve(load_config([*shape, "train.global_batch=1", "train.micro_batch=1"]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    optimizer = TrainingStep(cfg, mesh, stages).optimizer
    grads = [u.grad for u in stages.units.units.values()]
    for i, g in enumerate(grads):
        g.copy_(torch.randn(g.shape, generator=torch.Generator().manual_seed(i)))
    expected = sum(g.double().square().sum() for g in grads).sqrt().item()
    assert optimizer.reduce_stats(torch.zeros(1)).norm.item() == pytest.approx(expected, rel=1e-7)
