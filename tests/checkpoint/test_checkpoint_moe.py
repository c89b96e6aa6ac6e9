"""A checkpoint of a mixture of experts, resumed on another mesh, with other ranks sharing the experts; and where its
selection biases are stored."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from ndtrain import checkpoint
from ndtrain.checkpoint import State, elements, layouts, pretrained
from ndtrain.checkpoint.rewriting import average
from ndtrain.engine.generate import load_model
from tests.checkpoint.test_checkpoint_matrix import SAVED, check, ranks_of, resume, write
from tests.lib.helpers import flip, tensor_bytes
from tests.lib.ranks import run_ranks
from tests.lib.stages import RankStages

MOE = [
    "model.model_type=qwen2_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=20", "model.shared_expert_intermediate_size=24", "model.mlp_only_layers=[1]",
    "moe.bias_rate=0.05", "train.micro_batch=4",
]  # fmt: skip
SLICES = "layout.rules.expert_mlp=tp"
MESHES = {  # 90 ordered pairs
    "fsdp2": ["mesh.fsdp=2"],
    "pp2-tp2": ["mesh.pp=2", "mesh.tp=2", "schedule=zb_h1"],
    "dp2-fsdp2-cp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.zero=1"],
    "fsdp2-ep2": ["mesh.fsdp=2", "mesh.ep=2"],
    "dp2-fsdp2-ep2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "mesh.zero=2"],
    "fsdp2-cp2-tp2-ep4": ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2", "mesh.ep=4"],
    "pp2-dp2-fsdp2-ep2": [
        "mesh.pp=2", "mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "mesh.zero=3", "mesh.order=[fsdp,pp,dp,cp,tp]"
    ],
    "tp2-slices": ["mesh.tp=2", SLICES],
    "fsdp2-tp2-ep2-slices": ["mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "tp.sequence_parallel=false", SLICES],
    "dp2-fsdp2-cp2-ep8": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=8", "mesh.zero=1"],
}  # fmt: skip
SAMPLE = {"fsdp2-ep2": ["pp2-tp2", "tp2-slices"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of a mesh, made once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            run_ranks(write, ranks_of(MESHES[name]), [*MOE, *MESHES[name]], str(folder))
            made[name] = folder / f"step-{SAVED:08d}"
        return made[name]

    return get


def cases():
    for mesh in MESHES:
        others = [m for m in MESHES if m != mesh]
        yield pytest.param(mesh, others, marks=pytest.mark.full, id=f"{mesh}-from-any-other")
    for mesh, sources in SAMPLE.items():
        yield pytest.param(mesh, sources, id="-".join((mesh, "from", *sources)))


@pytest.mark.parametrize(("target", "sources"), list(cases()))
def test_moe_checkpoint_resumes_on_another_mesh(target, sources, written, tmp_path):
    """The checkpoint saved again has the same bytes, and the next step equals one process."""
    paths = {name: written(name) for name in sources}
    by_rank = run_ranks(
        resume, ranks_of(MESHES[target]), [*MOE, *MESHES[target]], paths, tmp_path / "again", timeout=300
    )
    (alone,) = run_ranks(resume, 1, MOE, paths, tmp_path / "alone")
    for name, path in paths.items():
        assert tensor_bytes(tmp_path / "again" / name / path.name) == tensor_bytes(path), f"from {name}"
        check([rank[name][1] for rank in by_rank], alone[name][1])
        state = load_file(path / "optimizer.safetensors")
        biases = {n: b for n, b in state.items() if "selection_bias" in n}
        assert biases.keys() == {f"selection_bias.model.layers.{i}" for i in (0, 2, 3, 4, 5)}
        assert all(b.dtype == torch.float32 and b.any() for b in biases.values())


def saved_biases(folder: Path) -> tuple[RankStages, Path, torch.Tensor]:
    """A small model with biases, its checkpoint, and the biases."""
    run = RankStages.build(["recipe=moe_debug"])
    run.stages.balance.bias_LX.copy_(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)))
    path = checkpoint.save(folder, run.stages, run.mesh, run.cfg, State(1, 1, {}))
    return run, path, run.stages.balance.bias_LX.clone()


IN_MODEL = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": "model" for i in (0, 1)}


@pytest.mark.parametrize("stem", ["optimizer", "model"])
def test_selection_biases_are_read_by_every_reader(stem, tmp_path):
    """They are stored with the optimizer's state, or in the model files under the family's own name for them."""
    naming = (lambda m: IN_MODEL) if stem == "model" else elements.bias_names
    with patch.object(elements, "bias_names", naming), patch.object(pretrained, "bias_names", naming):
        run, path, biases_LX = saved_biases(tmp_path)
        assert set(IN_MODEL) <= load_file(path / "model.safetensors").keys() or stem == "optimizer"
        for read in (checkpoint.load, checkpoint.load_weights):
            run.stages.balance.bias_LX.zero_()
            read(path, run.stages, run.mesh)
            assert torch.equal(run.stages.balance.bias_LX, biases_LX)
        blocks = load_model(path, torch.device("cpu")).model.layers
        assert all(torch.equal(blocks[str(i)].selection_bias, biases_LX[i]) for i in (0, 1))


def test_load_weights_refuses_non_finite_bias(tmp_path):
    """A router would always choose its expert, and no loss would show it."""
    run = RankStages.build(["recipe=moe_debug"])
    run.stages.balance.bias_LX[1, 3] = torch.nan
    path = checkpoint.save(tmp_path, run.stages, run.mesh, run.cfg, State(1, 1, {}))
    message = r"init_from=.*tensor selection_bias\.model\.layers\.1 has elements that are not finite numbers"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load_weights(path, run.stages, run.mesh)


@pytest.mark.parametrize("ema", [False, True], ids=["weights", "ema"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_average_keeps_selection_biases(family, ema, tmp_path):
    """They keep their own precision, in or next to the model files, for any dtype of the weights."""
    router = ["model.norm_topk_prob=true"] if family == "qwen3_moe" else ["model.n_shared_experts=1"]
    own = ["recipe=moe_debug", f"model.model_type={family}", *router, *(["optim.ema=0.5"] if ema else [])]
    paths, drawn = [], []
    for seed in (0, 1):
        run = RankStages.build(own)
        run.stages.balance.bias_LX.copy_(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)))
        paths.append(checkpoint.save(tmp_path / str(seed), run.stages, run.mesh, run.cfg, State(1, 1, {})))
        drawn.append(run.stages.balance.bias_LX.clone())
    average(paths, tmp_path / "mean", weights=[1, 3], dtype=torch.bfloat16, ema=ema)
    average(paths[:1], tmp_path / "one", dtype=torch.bfloat16, ema=ema)
    for folder, expected_LX in (("mean", drawn[0] / 4 + drawn[1] * 3 / 4), ("one", drawn[0])):
        read_LX = pretrained.selection_biases(tmp_path / folder, run.stages.model)
        torch.testing.assert_close(read_LX, expected_LX, rtol=1e-6, atol=1e-7)
        files = {p.name: load_file(p) for p in (tmp_path / folder).glob("*.safetensors")}
        assert set(files) == {"model.safetensors", *(["optimizer.safetensors"] if family == "qwen3_moe" else [])}
        assert files["model.safetensors"]["lm_head.weight"].dtype == torch.bfloat16


def test_load_without_saved_biases_sets_zeros(tmp_path):
    none = lambda stages, stem: {}
    with patch.object(elements, "biases_of", none), patch.object(layouts, "biases_of", none):
        run, path, biases_LX = saved_biases(tmp_path)
    assert biases_LX.any()
    checkpoint.load(path, run.stages, run.mesh)
    assert not run.stages.balance.bias_LX.any()


def test_load_names_damaged_bias(tmp_path):
    run, path, _ = saved_biases(tmp_path)
    file = path / "optimizer.safetensors"
    flip(file, file.stat().st_size - 3)  # of the last tensor
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"selection_bias\.model\.layers\.1"):
        checkpoint.load(path, run.stages, run.mesh)
