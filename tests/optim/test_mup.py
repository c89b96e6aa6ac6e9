"""muP (`model.mup_base`): factors by the role of a parameter, changes that do not grow with the width, refusals."""

from fnmatch import fnmatchcase

import pytest
import torch

from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import Dim, TensorLayout
from ndtrain.model import params
from ndtrain.model.init import fill
from ndtrain.model.spec import Role
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.param_groups import ParamGroup, param_group
from tests.lib.helpers import config_refusal
from tests.lib.parity import FP64, compare, make_batches, train
from tests.parallel.test_parity_tp_cp import MODEL

FULL = pytest.mark.full
MODELS = ("llama_small", "qwen3_30b_a3b", "mixtral_8x7b", "moe_small", "deepseek_v3")
OPTIMIZERS = {
    "adamw": ["optim=adamw"], "lion": ["optim=lion"], "muon": ["optim=muon", "optim.ns_dtype=fp32"],
    "muon-original": ["optim=muon", "optim.ns_dtype=fp32", "optim.adjust=original"],
}  # fmt: skip
HIDDEN_POWER = {"adamw": 1, "lion": 1, "muon": 0.5, "muon-original": 0}


def role_by_name(name: str) -> Role:
    """The role as Hugging Face's names tell it."""
    if "norm" in name or "embed" in name or name.endswith(("bias", "sinks")):
        return Role.OTHER
    readouts = ("lm_head.weight", "*.mlp.gate.weight", "*.block_sparse_moe.gate.weight", "*.shared_expert_gate.weight")
    return Role.READOUT if any(fnmatchcase(name, pattern) for pattern in readouts) else Role.HIDDEN


@pytest.mark.parametrize("model", MODELS)
def test_roles_are_those_of_the_names(model):
    table = params(resolve(load_config([f"model={model}"]), 1).model)
    assert {name: p.role for name, p in table.items()} == {name: role_by_name(name) for name in table}
    assert {p.role for p in table.values()} == set(Role)


def layout(name: str, role: Role, ndim: int = 2) -> TensorLayout:
    dims = tuple(Dim(d, 8) for d in ("mlp", "embed")[:ndim])
    return TensorLayout(
        name, dims, ((0, 8),) * ndim, frozenset(), hidden=role is Role.HIDDEN, readout=role is Role.READOUT
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_factors_of_a_model_four_times_as_wide(optimizer):
    given = ["optim.lr_mult={*.q_proj.*:3}", "optim.weight_decay=0.5"]
    cfg = resolve(load_config(["model=llama_small", "model.mup_base=64", *OPTIMIZERS[optimizer], *given]), 1)
    hidden = 4.0 ** -HIDDEN_POWER[optimizer]
    group = lambda name, role, ndim=2: param_group(cfg.optim, layout(name, role, ndim))
    assert group("up_proj", Role.HIDDEN) == ParamGroup(hidden, 0.5 / hidden)
    assert group("x.q_proj.weight", Role.HIDDEN) == ParamGroup(3 * hidden, 0.5 / hidden)
    assert group("lm_head.weight", Role.READOUT) == ParamGroup(0.25, 2.0)
    assert group("embed", Role.OTHER) == ParamGroup(1, 0.5) and group("norm", Role.OTHER, 1) == ParamGroup(1, 0)


def test_initial_weights_of_a_model_four_times_as_wide():
    wide = resolve(load_config(["model=moe_small", "model.mup_base=64", "model.init_mult={*.q_proj.*:3}"]), 1).model
    plain = resolve(load_config(["model=moe_small", "model.init_mult={*.q_proj.*:3}"]), 1).model
    for param in params(wide).values():
        a, b = torch.empty(16), torch.empty(16)
        fill(a, wide, 0, param, 0)
        fill(b, plain, 0, param, 0)
        factor = {Role.HIDDEN: 0.5, Role.READOUT: 0.25, Role.OTHER: 1}[param.role]
        assert torch.allclose(a, factor * b, rtol=1e-6), param.name


# ------------------------------------------------------------------------------------------- changes at several widths

STEPS = 4


def logits_change(width: int, overrides: list[str]) -> float:
    """The root mean square of the change of the logits of fixed tokens by a few steps, in a model of this width."""
    words = [
        f"model.hidden_size={width}", f"model.intermediate_size={2 * width}", "model.vocab_size=64",
        f"model.num_attention_heads={width // 16}", f"model.num_key_value_heads={width // 16}",
        "model.num_hidden_layers=2", "train.seq_len=16", "train.global_batch=4", "optim.schedule=constant",
        "optim.lr=3e-3", "optim.clip=null", "optim.weight_decay=0", "optim.warmup=0", f"train.steps={STEPS}",
        "model.initializer_range=0.1",
    ]  # fmt: skip
    cfg = resolve(load_config([*words, *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, 0)
    step, (model,) = TrainingStep(cfg, mesh, stages), stages.models.values()
    tokens = make_batches(cfg, mesh, 1, "none")[0].tokens
    before = logits(model, tokens)
    for number in range(1, STEPS + 1):
        step.run(number, make_batches(cfg, mesh, 1, "none")).wait()
    return (logits(model, tokens) - before).square().mean().sqrt().item()


@torch.no_grad()
def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(tokens).double()


@pytest.mark.parametrize("optimizer", ["adamw", *(pytest.param(o, marks=FULL) for o in OPTIMIZERS if o != "adamw")])
def test_change_of_logits_does_not_grow_with_the_width(optimizer):
    """Without muP it grows by more than the root of the width."""
    at = lambda width, *mup: logits_change(width, [*OPTIMIZERS[optimizer], *mup])
    narrow, wide, transferred = at(32), at(128), at(128, "model.mup_base=32")
    assert at(32, "model.mup_base=32") == narrow
    assert wide > 2 * narrow and 0.6 * narrow < transferred < 1.25 * narrow


MESHES = {
    "fsdp2-muon": (2, ["mesh.fsdp=2", *OPTIMIZERS["muon"], "optim.ns_dtype=fp64"]), "tp2": (2, ["mesh.tp=2"]),
    "pp2-offload": (2, ["mesh.pp=2", "optim.offload=true"]), "cp2-dp2": (4, ["mesh.cp=2", "mesh.dp=2"]),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [*(pytest.param(m, marks=[] if m == "tp2" else FULL) for m in MESHES)])
def test_every_mesh_equals_one_process(mesh):
    ranks, words = MESHES[mesh]
    common = [*MODEL, *FP64, "model.mup_base=12", "optim.weight_decay=0.5", "train.micro_batch=4"]
    optimizer = [w for w in words if w.startswith("optim")]
    kinds = ("weight", "gradient")
    run, one = train(ranks, [*common, *words]), train(1, [*common, *optimizer])
    compare(run, one, 1e-10, 1e-9)
    plain = train(1, [w for w in common if "mup" not in w] + optimizer)
    assert all(not torch.equal(plain.tensors[k][n], one.tensors[k][n]) for k in kinds for n in ("lm_head.weight",))


BAD = {
    "tied": (["model.tie_word_embeddings=true"], "model.mup_base=64: the head needs another learning rate than"),
    "sgd": (["optim=sgd"], "model.mup_base=64: how the learning rate of optim=sgd depends on the width is not known"),
    "torch": (["optim=torch", "optim.torch_name=Adamax"], "choose optim=adamw, lion or muon"),
    "another width": (["optim.mup_width=2"], "optim.mup_width=2.0: it follows from model.mup_base=64"),
    "no base": (["model.mup_base=null", "optim.mup_width=2"], "it follows from model.mup_base=None"),
    "0": (["model.mup_base=0"], "model.mup_base=0: must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_mup_is_refused(case):
    words, message = BAD[case]
    assert message in config_refusal(["model=llama_small", "model.mup_base=64", *words])
