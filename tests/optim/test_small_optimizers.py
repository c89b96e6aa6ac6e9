"""sgd, lion and the elementwise optimizers of `torch.optim`, on slices and on meshes."""

import pytest
import torch

from ndtrain.config import ConfigError, load_config
from ndtrain.config.registry import get
from ndtrain.optim import OptimTensor, Update
from tests.lib.parity import FP64, SHAPE, assemble, compare, rank_run
from tests.lib.ranks import run_ranks

TORCH = {
    "Adadelta": {"rho": 0.8}, "Adagrad": {}, "Adam": {"betas": [0.8, 0.9], "amsgrad": True}, "AdamW": {}, "Adamax": {},
    "RAdam": {}, "RMSprop": {"alpha": 0.9, "centered": True, "momentum": 0.5},
    "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


def overrides_of(name: str) -> list[str]:
    args = ",".join(f"{key}:{str(value).replace(' ', '')}" for key, value in TORCH[name].items())
    return ["optim=torch", f"optim.torch_name={name}", *[f"optim.torch_args={{{args}}}"] * bool(args)]


def updated(overrides: list[str], skipped: int | None = None, last: int = 6) -> torch.Tensor:
    """A vector after the updates up to `last`. The update `skipped` has a gradient that is not finite."""
    cfg = load_config([*overrides, "optim.weight_decay=0"]).optim
    kind = get("optimizer", cfg.name)
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64)
    state = {spec.name: torch.zeros_like(weight) for spec in kind.state_spec(cfg)}
    optimizer, made = kind(cfg), 0
    tensor = OptimTensor(weight, torch.zeros_like(weight), state, 0.0, lr_mult=2.0)
    for number in range(1, last + 1):
        skips = number == skipped
        tensor.grad.copy_(torch.full((8,), torch.nan) if skips else torch.sin(made + 1 + torch.arange(8.0)))
        optimizer.step(
            [tensor], Update(number, torch.tensor(float(made)), 0.01, torch.tensor(float(skips)), torch.tensor(2.0))
        )
        made += not skips
    return weight


@pytest.mark.parametrize("name", TORCH)
def test_updates_equal_torchs(name):
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    decay = {"weight_decay": 0}
    theirs = getattr(torch.optim, name)([weight], lr=0.02, **decay, **TORCH[name])
    for number in range(1, 7):
        weight.grad = torch.sin(number + torch.arange(8.0)).double() / 2
        theirs.step()
    torch.testing.assert_close(updated(overrides_of(name)), weight.detach(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "overrides", [["optim=sgd"], ["optim=sgd", "optim.momentum=0"], ["optim=lion"], overrides_of("RAdam")], ids=str
)
def test_a_skipped_step_changes_nothing(overrides):
    assert torch.equal(updated(overrides, skipped=3), updated(overrides, last=5))


def test_sgd_equals_torchs_without_decay():
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.SGD([weight], lr=0.02, momentum=0.9)
    for number in range(1, 7):
        weight.grad = torch.sin(number + torch.arange(8.0)).double() / 2
        theirs.step()
    torch.testing.assert_close(updated(["optim=sgd"]), weight.detach(), rtol=1e-14, atol=0)


MESHES = {
    "sgd": (4, ["optim=sgd", "mesh.fsdp=2", "mesh.tp=2", "model.num_key_value_heads=2"], ("momentum_buffer",)),
    "lion": (2, ["optim=lion", "mesh.pp=2", "model.num_key_value_heads=2"], ("exp_avg",)),
    "torch": (
        2,
        [*overrides_of("RMSprop"), "mesh.fsdp=2", "optim.offload=true"],
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_training_on_mesh_equals_one_process(name):
    ranks, overrides, state = MESHES[name]
    kinds = [("weight", "master"), *((s, s) for s in state)]
    run = [*SHAPE, *FP64, "train.global_batch=8"]
    same = [o for o in overrides if o.startswith(("model.", "optim")) and "offload" not in o]
    got = assemble(run_ranks(rank_run, ranks, [*run, *overrides, "train.micro_batch=2"], "uneven", kinds))
    want = assemble(run_ranks(rank_run, 1, [*run, *same, "train.micro_batch=8"], "uneven", kinds))
    compare(got, want, loss=1e-10, state=1e-9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.torch_name=Muon"], "Muon: it does not work element by element; known: ASGD, Adadelta"),
        (["optim.torch_name=Adma"], "Adma: no such optimizer; known: "),
        (["optim.torch_name=NAdam"], "its state mu_product is not a tensor of the parameter's shape"),
        (["optim.torch_name=Rprop"], "its state step_size is not"),
        (["optim.torch_name=Adam", "optim.torch_args={rho:1}"], "optim.torch_args.rho: Adam has no such argument"),
        (["optim.torch_name=Adam", "optim.torch_args={eps:-1}"], "optim.torch_args: Adam: Invalid epsilon value"),
        ([], "optim.torch_name=None: no such optimizer"),
    ],
)  # fmt: skip
def test_wrong_names_and_arguments_are_refused(overrides, message):
    cfg = load_config(["optim=torch", *overrides]).optim
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        get("optimizer", "torch").state_spec(cfg)
