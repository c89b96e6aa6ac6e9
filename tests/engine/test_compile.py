"""train.compile: the training is the same. A block is one graph, compiled once for all blocks and never again."""

from functools import partial, partialmethod

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.train_step import Evaluation, TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model.block import linear
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.parallel.linear.matmul import MatmulImpl
from tests.lib.parity import FP64, compare, make_batches, train
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL, error

COMPILE = "train.compile=true"
SMALL = [*MODEL, "train.global_batch=8", "train.micro_batch=2"]
PACKED, FULL, EVERY = "data.pack=true", "recompute=full", "recompute=every"
FP8 = [
    "precision.compute=fp8", "model.hidden_size=64", "model.intermediate_size=64", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.head_dim=16",
]  # fmt: skip


def count_graphs(overrides: list[str], backend: str) -> tuple[list[int], list[str]]:
    """(graphs of blocks compiled after each of five steps, why any graph broke), with an evaluation after the second
    and the third. Any compilation after the second step and the first evaluation raises."""
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    counters.clear()
    # the captured graphs do not depend on the backend, which generates no code
    without_code, of_blocks = lookup_backend(backend), []
    torch.compile = partial(torch.compile, backend=without_code)  # the loss
    counting = lambda graph, inputs: of_blocks.append(graph) or without_code(graph, inputs)
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=counting)
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*SMALL, COMPILE, "train.steps=5", *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, evaluation = TrainingStep(cfg, mesh, stages), Evaluation(cfg, mesh, stages)
    graphs = []
    for number in range(1, 6):
        step.run(number, make_batches(cfg, mesh, number, "uneven")).wait()
        if number in (2, 3):
            evaluation.run([make_batches(cfg, mesh, 100 + number, "uneven")])
        torch._dynamo.config.error_on_recompile = number >= 2
        graphs.append(len(of_blocks))
    return graphs, list(counters["graph_break"])


ONE_GRAPH = {
    "fsdp, packed": (2, ["mesh.fsdp=2", PACKED]),
    "one process, eight layers": (1, ["model.num_hidden_layers=8"]),
    "one process, window": (1, ["model.model_type=mistral", "model.sliding_window=5"]),
    "one process, alibi": (1, ["model.alibi=true", FULL]),
    "zero 1": (2, ["mesh.fsdp=2", "mesh.zero=1", FULL]),
    "bf16": (1, ["precision.compute=bf16"]),
    "bf16, fsdp": (2, ["precision.compute=bf16", "mesh.fsdp=2", FULL]),
    "bf16, zero 1": (2, ["precision.compute=bf16", "mesh.fsdp=2", "mesh.zero=1", PACKED]),
    "bf16, cp": (2, ["precision.compute=bf16", "mesh.cp=2", FULL]),
    "fp8": (1, [*FP8, PACKED]),
    "fp8, fsdp": (2, [*FP8, "mesh.fsdp=2", FULL]),
    "dp": (2, ["mesh.dp=2", EVERY, "recompute.every=2", PACKED]),
    "pp": (2, ["mesh.pp=2", "model.num_hidden_layers=4", PACKED]),
    "cp": (2, ["mesh.cp=2", PACKED]),
    "cp, recompute": (2, ["mesh.cp=2", FULL]),
    "fsdp, cp, pp": (8, ["mesh.fsdp=2", "mesh.cp=2", "mesh.pp=2", "model.num_hidden_layers=4"]),
}
SAMPLED = "bf16"


@pytest.mark.parametrize("name", [n if n == SAMPLED else pytest.param(n, marks=pytest.mark.full) for n in ONE_GRAPH])
def test_compiled_blocks_share_one_graph(name):
    """One graph with gradients and one without (for evaluation, and the forward of a recomputed block)."""
    ranks, overrides = ONE_GRAPH[name]
    backend = "eager" if name == SAMPLED else "aot_eager"
    for graphs, breaks in run_ranks(count_graphs, ranks, overrides, backend, timeout=300):
        assert not breaks
        assert graphs[1:] == [2] * 4


ONE_STEP = ["train.steps=1", "train.micro_batch=1", "train.seq_len=48"]  # no matrix has a side of 48


def weight_gradients_in_graphs(overrides: list[str], by_autograd: bool) -> tuple[int, int]:
    """(weight gradients that the blocks' backward graphs make or return, custom ops in them that accumulate some) of a
    step. `by_autograd`: matmuls as autograd differentiates them."""
    torch._dynamo.reset()
    graphs = []
    keep = lambda graph, inputs: graphs.append(graph) or make_boxed_func(graph.forward)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=keep)
    torch.compile = partial(torch.compile, backend="eager")  # the loss
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=backend)
    if by_autograd:
        MatmulImpl.in_graph = lambda self, x, weights, biases: linear(x, weights, biases)
    cfg = resolve(load_config([*SMALL, COMPILE, *ONE_STEP, *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    matrices = [p.shape for model in stages.models.values() for p in model.parameters() if p.ndim == 2]
    shapes = {shape for m, n in matrices for shape in ((m, n), (n, m))}
    TrainingStep(cfg, mesh, stages).run(1, make_batches(cfg, mesh, 1, "none")).wait()
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    made = [n for n in nodes if n.target is torch.ops.aten.mm.default and tuple(n.meta["val"].shape) in shapes]
    ops = [n for n in nodes if "linear_backward" in str(n.target)]
    return len(made), len(ops)


@pytest.mark.parametrize("overrides", [["precision.compute=bf16"], pytest.param([*FP8], marks=pytest.mark.full)])
def test_compiled_graphs_make_no_weight_gradient(overrides):
    """Each is added to its buffer by one of the four custom ops of a block. Of the graphs that autograd makes, the same
    count finds all seven of a block, so it can fail."""
    assert run_ranks(weight_gradients_in_graphs, 1, overrides, False) == [(0, 4)]
    if overrides == ["precision.compute=bf16"]:
        assert run_ranks(weight_gradients_in_graphs, 1, overrides, True) == [(7, 0)]


SELECTIVE, BF16 = ["recompute=selective"], ["precision.compute=bf16"]
LINEAR, CORE = "Block.linear", "_core.<locals>.core"
MIXED = [
    "model=moe_debug", "model.model_type=qwen2_moe", "model.mlp_only_layers=[0]",
    "model.shared_expert_intermediate_size=24",
]  # fmt: skip
EXPERTS = {
    "LinearOps.wide_linear", "LinearOps.grouped_linear", "DisableContext.__call__", "SavedExchange.receive",
    "SavedExchange.to_tokens",
}  # fmt: skip
# Graphs break only at calls that send something, save a result or defer a gradient. The last entry is the number of
# pieces between them, each of which is at least two graphs: with gradients and without.
BREAKS = {
    "tp": (2, ["mesh.tp=2"], {LINEAR}, 5),
    "ulysses": (2, ["mesh.cp=2", "cp.kind=ulysses"], {"head_shares"}, 2),
    "selective": (1, SELECTIVE, {LINEAR, CORE}, 6),
    "budget": (1, ["recompute=budget", "recompute.budget=410kB"], {LINEAR, CORE}, 6),
    "selective, ring": (2, ["mesh.cp=2", *SELECTIVE], {LINEAR}, 5),
    "gradients deferred": (2, ["mesh.pp=2", "schedule=zb_h1", "model.num_hidden_layers=4"], {LINEAR}, 5),
    "experts": (1, ["model=moe_debug"], {LINEAR, *EXPERTS}, 8),
    # a dense layer, and experts for all tokens: matmuls of one, two and three weights
    "experts and MLPs": (1, MIXED, {LINEAR, *EXPERTS}, 8),
}
# a parameter that has a gradient of another precision would break them too
BREAKS |= {f"{name}, bf16": (n, [*more, *BF16], *rest) for name, (n, more, *rest) in BREAKS.items()}


@pytest.mark.parametrize(
    "name", [n if n == "experts, bf16" else pytest.param(n, marks=pytest.mark.full) for n in BREAKS]
)
def test_graph_breaks_are_at_expected_calls(name):
    ranks, overrides, calls, pieces = BREAKS[name]
    backend = "eager" if name == "experts, bf16" else "aot_eager"
    for graphs, breaks in run_ranks(count_graphs, ranks, overrides, backend, timeout=300):
        assert len(set(graphs[1:])) == 1 and graphs[1] >= 2 * pieces
        assert breaks and all(any(call in why for call in calls) for why in breaks)
        assert all(any(call in why for why in breaks) for call in calls)


MESHES = {
    "one process": (1, []),
    "one process, packed": (1, [PACKED, FULL]),
    "fsdp": (2, ["mesh.fsdp=2"]),
    "zero 1": (2, ["mesh.fsdp=2", "mesh.zero=1", FULL]),
    "dp": (2, ["mesh.dp=2", EVERY]),
    "pp": (2, ["mesh.pp=2"]),
    "tp": (2, ["mesh.tp=2"]),
    "cp": (2, ["mesh.cp=2", PACKED]),
    "cp, recompute": (2, ["mesh.cp=2", FULL, PACKED]),
    "tp, cp": (4, ["mesh.tp=2", "mesh.cp=2", PACKED]),
    "selective": (1, [*SELECTIVE, PACKED]),
    "budget": (1, ["recompute=budget", "recompute.budget=520kB"]),  # one block keeps its graph, two keep two results
    "selective, cp": (2, ["mesh.cp=2", "recompute=selective", "recompute.keep=[core,qkv_proj]"]),
    "gradients deferred": (2, ["mesh.pp=2", "schedule=zb_h1"]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", list(MESHES))
def test_compiled_training_equals_eager_in_fp64(name):
    ranks, overrides = MESHES[name]
    same = [*SMALL, *FP64, *[PACKED] * (PACKED in overrides)]
    run = train(ranks, [*same, *overrides, COMPILE], "uneven")
    compare(run, train(1, same, "uneven"), loss=1e-10, state=1e-9)


LOWER = ["train.steps=1", COMPILE]


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "cp"])
def test_compiled_training_equals_eager_in_fp32(name):
    ranks, overrides = MESHES[name]
    same = [*SMALL, *[PACKED] * (PACKED in overrides)]
    compare(
        train(ranks, [*same, *overrides, *LOWER], "uneven"), train(1, [*same, "train.steps=1"], "uneven"), 1e-6, 1e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero 1", "cp"])
def test_compiled_bf16_rounds_no_more_than_eager(name):
    """Gradients of the microbatches, which the graphs return in bf16, are summed in fp32."""
    ranks, overrides = MESHES[name]
    same = [*SMALL, "train.micro_batch=1", "train.steps=1", *[PACKED] * (PACKED in overrides)]
    exact, eager = train(1, [*same, *FP64], "uneven"), train(1, [*same, "precision.compute=bf16"], "uneven")
    run = train(ranks, [*same, *overrides, "precision.compute=bf16", COMPILE], "uneven")
    assert all(g.dtype == torch.float32 for g in run.tensors["gradient"].values())
    print(f"{name}: {error(run, exact):.2e}, eager {error(eager, exact):.2e}")
    assert error(run, exact) < 1.25 * error(eager, exact)
