"""Matrices that are neighbours in memory are fused into one matmul, and gradients have the layout it needs."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ndtrain.config import load_config, resolve
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import Dim, FlatLayout, Layouts, UnitGroups
from ndtrain.model.contiguous import cat, cat_if_contiguous
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import rope_table, rotate
from ndtrain.model.swiglu import swiglu
from ndtrain.parallel.build import build_stages, initialise
from tests.lib.parity import SHAPE, make_batches


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_joins_neighbours_without_copy(dim):
    whole = torch.arange(24.0).view(4, 6)
    parts = whole.split_with_sizes((1, 3) if dim == 0 else (1, 5), dim)
    assert torch.equal(cat_if_contiguous(parts, dim), whole)
    assert cat_if_contiguous(parts, dim).data_ptr() == cat(parts, dim).data_ptr() == whole.data_ptr()


def test_cat_copies_tensors_that_are_no_neighbours():
    whole = torch.arange(24.0).view(4, 6)
    a, b, c = whole.split(2, 1)
    strange = {
        "in another order": (b, a),
        "with a gap": (a, c),
        "of another memory": (a, b.clone()),
        "of other strides": (whole[:2, :2], whole.view(2, 12)[:, 2:4]),
    }
    for why, parts in strange.items():
        assert cat_if_contiguous(parts, 1) is None, why
        assert torch.equal(cat(parts, 1), torch.cat(parts, 1)), why


def test_cat_does_not_join_adjacent_storages():
    """Two allocations of one pool may be neighbours, but they stay two storages."""
    pool = torch.arange(8.0)
    two = [torch.frombuffer(pool.numpy(), dtype=torch.float32, count=4, offset=16 * i).view(1, 4) for i in range(2)]
    assert two[0].data_ptr() + 16 == two[1].data_ptr()
    assert cat_if_contiguous(two, 0) is None
    assert torch.equal(cat(two, 0), pool.view(2, 4))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_of_swiglu_norm_and_rope_pass_gradcheck():
    """The gradients come out side by side, as the inputs went in."""
    torch.autograd.gradcheck(swiglu, (leaf(3, 4), leaf(3, 4)))
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (leaf(3, 4), leaf(4)))
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (leaf(2, 3, 2, 4), leaf(4)))
    table = rope_table(torch.arange(3), torch.tensor([1.0, 0.3]), torch.float64)
    turn = lambda q, k: rotate(q, k, table)
    torch.autograd.gradcheck(turn, (leaf(2, 3, 4, 4), leaf(2, 3, 2, 4)))
    torch.autograd.gradcheck(lambda qk: turn(*qk.split((4, 2), 2)), (leaf(2, 3, 6, 4),))

    for made, dim, sizes, fn in ((leaf(2, 3, 6, 4), 2, (4, 2), turn), (leaf(3, 8), 1, (4, 4), swiglu)):
        parts = [x.detach().requires_grad_() for x in made.split(sizes, dim)]
        out = fn(*parts)
        total = out.sum() if isinstance(out, torch.Tensor) else sum((x * x.detach()).sum() for x in out)
        assert cat_if_contiguous(torch.autograd.grad(total, parts), dim) is not None
    q, k = (x.detach() for x in leaf(2, 3, 6, 4).split((4, 2), 2))
    assert cat_if_contiguous(turn(q, k), 2) is not None and cat_if_contiguous(turn(q.clone(), k), 2) is None
    for got, want in zip(turn(q.clone(), k), turn(q, k), strict=True):
        torch.testing.assert_close(got, want)


def test_can_fuse_requires_same_input_and_rows():
    wide, narrow, embed = Dim("heads", 4, 2), Dim("kv_heads", 2, 2), Dim("embed", 6)
    tensors = {"q": (wide, embed), "k": (narrow, embed), "o": (embed, wide), "norm": (embed,)}
    rules = {"heads": "tp", "kv_heads": "tp"}

    def can_fuse(tp: int, *names: str) -> bool:
        mesh = MeshSpec(("pp", "dp", "fsdp", "cp", "tp"), (1, 1, 1, 1, tp))
        layouts = Layouts(tensors, rules, mesh, rank=0)
        return FlatLayout.of([layouts[name] for name in tensors], UnitGroups()).can_fuse(names)

    assert can_fuse(1, "q", "k") and can_fuse(2, "q", "k")
    assert not can_fuse(4, "q", "k"), "each k is held by two ranks, and so stands behind those that are not"
    assert not can_fuse(1, "k", "q") and not can_fuse(1, "q", "o") and not can_fuse(1, "o", "norm")
    assert not can_fuse(1, "k", "o"), "rows of another width"


class MatmulCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def products_of_a_step(overrides: list[str]) -> int:
    """The number of matmuls in one step of one microbatch."""
    cfg = resolve(load_config([*SHAPE, "train.global_batch=2", *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, batches = TrainingStep(cfg, mesh, stages), make_batches(cfg, mesh, 1, "none")
    with MatmulCount() as matmul:
        step.run(1, batches).wait()
    return sum(matmul.seen.values())


LATENT = [
    "model.model_type=deepseek_v3", "model.num_key_value_heads=6", "model.num_experts=4", "model.num_experts_per_tok=2",
    "model.first_k_dense_replace=3", "model.n_shared_experts=1", "model.q_lora_rank=10", "model.kv_lora_rank=8",
    "model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4", "model.v_head_dim=6",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "of_layer"),
    [([], 5), (["mesh.zero=1"], 5), (["model.model_type=qwen2"], 5), (LATENT, 6)],
    ids=["llama", "zero1", "qwen2", "latents"],
)
def test_fused_weights_need_one_matmul(overrides, of_layer):
    """Forward, and for the weights' and the input's gradients, in each of three layers, and the head's in three chunks.
    A layer has q with k, v, o, gate with up, and down; with latent attention it has the projections into both latents,
    the two out of them, o, gate with up, and down."""
    assert products_of_a_step(overrides) == 3 * (3 * of_layer + 3)
