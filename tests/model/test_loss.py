"""Objectives: the loss of a chunk's logits, its gradient, and what is compiled of it."""

from importlib import import_module
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy

from ndtrain.config import ObjectiveConfig
from ndtrain.model.loss import chunked_loss
from ndtrain.model.objective import COMPILED, CrossEntropy, make_objective
from ndtrain.model.vocabulary import IGNORE, LOCAL, Targets
from tests.lib.plugins import importable

V, N, E, SCALE = 101, 42, 24, 0.1
CONFIGS = {
    "cross_entropy": ObjectiveConfig(),
    "z_loss": ObjectiveConfig(z_loss=0.01),
    "weighted": ObjectiveConfig(name="weighted"),
    "weighted, z_loss": ObjectiveConfig(name="weighted", z_loss=0.01),
    "distillation": None,  # of the example package
}


@pytest.fixture(autouse=True)
def example_package():
    with importable():
        yield


def config_of(name: str) -> ObjectiveConfig:
    if name != "distillation":
        return CONFIGS[name]
    return import_module("example_package.distillation").DistillationConfig(name="distillation")


def random_case(dtype: torch.dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(N, E, dtype=dtype), torch.randn(V, E, dtype=dtype)
    labels = torch.randint(0, V, (N,)).masked_fill(torch.rand(N) < 0.3, IGNORE)
    columns = {
        "weights": torch.tensor([0, 0.3, 1, 2])[torch.randint(0, 4, (N,))],
        "teacher_ids": torch.randint(0, V, (N, 3)),
        "teacher_probs": torch.rand(N, 3).softmax(1),
    }
    return x, weight, Targets(labels, columns)


def losses_of(x, weight, targets, objective, wanted):
    """(sums, gradient of x, gradient of the weight) over chunks of 16 tokens, the last of which is shorter."""
    dw = torch.zeros(weight.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    add = lambda a, b: dw.add_(a @ b)
    scale = torch.tensor(SCALE, dtype=dw.dtype)
    sums, dx = chunked_loss(x, weight, targets, scale, 16, wanted, add, LOCAL, objective)
    return [sums, dx, dw] if wanted else [sums]


def expected(x, weight, targets, cfg: ObjectiveConfig):
    """The same by autograd, from the formula in the objective's documentation."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.T
    token_weights = (targets.labels != IGNORE).to(x.dtype)
    if cfg.name == "weighted":
        token_weights = token_weights * targets.columns["weights"]
    token_weights = token_weights * SCALE
    label_losses = cross_entropy(logits, targets.labels, reduction="none", ignore_index=IGNORE)
    sums = [(label_losses * token_weights).sum()]
    total = sums[0]
    if cfg.z_loss:
        sums.append((logits.logsumexp(1).square() * token_weights).sum())
        total = sums[0] + cfg.z_loss * sums[1]
    if cfg.name == "distillation":
        chosen = logits.log_softmax(1).gather(1, targets.columns["teacher_ids"])
        teacher = (-(chosen * targets.columns["teacher_probs"]).sum(1) * token_weights).sum()
        sums = [cfg.alpha * teacher + (1 - cfg.alpha) * sums[0], teacher]
        total = sums[0]
    return [torch.stack(sums).detach(), *torch.autograd.grad(total, (x, weight))]


@pytest.fixture
def compiled():
    """Makes compiled objectives, whose graphs run op by op."""
    compile_ = torch.compile
    COMPILED.clear()
    with mock.patch.object(torch, "compile", lambda f: compile_(f, backend="aot_eager")):
        yield lambda cfg: make_objective(cfg, compiled=True)
    COMPILED.clear()


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_of_objective_equal_its_formula(name):
    cfg = config_of(name)
    x, weight, targets = random_case(torch.float64)
    got = losses_of(x, weight, targets, make_objective(cfg), wanted=True)
    for a, b in zip(got, expected(x, weight, targets, cfg), strict=True):
        assert a.shape == b.shape and (a - b).norm() <= 1e-12 * b.norm()
    assert torch.equal(losses_of(x, weight, targets, make_objective(cfg), wanted=False)[0], got[0])


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 1e-12),
        pytest.param(torch.float32, 1e-6, marks=pytest.mark.full),
        (torch.bfloat16, 1e-2),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_objective_equals_eager(compiled, name, dtype, bound):
    x, weight, targets = random_case(dtype)
    for wanted in (True, False):
        with torch.no_grad():
            forms = make_objective(config_of(name)), compiled(config_of(name))
            want, got = (losses_of(x, weight, targets, objective, wanted) for objective in forms)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and (a - b).norm() <= bound * b.norm()


def test_objectives_with_equal_settings_share_compiled_code(compiled):
    assert compiled(ObjectiveConfig()) is compiled(ObjectiveConfig())
    assert compiled(ObjectiveConfig(z_loss=0.1)) is not compiled(ObjectiveConfig())
    assert isinstance(make_objective(ObjectiveConfig()), CrossEntropy)
    assert type(make_objective(config_of("distillation"))).__name__ == "Distillation"
