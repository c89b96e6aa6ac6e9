"""A checkpoint of a mixture of experts, resumed on another mesh, with other ranks sharing the experts."""

import pytest

from tests.checkpoint.test_checkpoint_matrix import SAVED, check, ranks_of, resume, write
from tests.lib.helpers import tensor_bytes
from tests.lib.ranks import run_ranks

MOE = [
    "model.model_type=qwen2_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=20", "model.shared_expert_intermediate_size=24", "model.mlp_only_layers=[1]",
]  # fmt: skip
MESHES = {  # 56 ordered pairs
    "fsdp2": ["mesh.fsdp=2"],
    "pp2-tp2": ["mesh.pp=2", "mesh.tp=2", "schedule=zb_h1"],
    "dp2-fsdp2-cp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.zero=1"],
    "fsdp2-ep2": ["mesh.fsdp=2", "mesh.ep=2"],
    "dp2-fsdp2-ep2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "mesh.zero=2"],
    "fsdp2-cp2-tp2-ep4": ["mesh.fsdp=2", "mesh.cp=2", "mesh.tp=2", "mesh.ep=4"],
    "pp2-dp2-fsdp2-ep2": [
        "mesh.pp=2", "mesh.dp=2", "mesh.fsdp=2", "mesh.ep=2", "mesh.zero=3", "mesh.order=[fsdp,pp,dp,cp,tp]"
    ],
    "dp2-fsdp2-cp2-ep8": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.ep=8", "mesh.zero=1"],
}  # fmt: skip
SAMPLE = {"fsdp2-ep2": ["pp2-tp2"]}


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
def test_resumed_on_another_mesh(target, sources, written, tmp_path):
    """Saved again, the bytes are the same, and the next step is that of one process."""
    paths = {name: written(name) for name in sources}
    by_rank = run_ranks(
        resume, ranks_of(MESHES[target]), [*MOE, *MESHES[target]], paths, tmp_path / "again", timeout=300
    )
    (alone,) = run_ranks(resume, 1, MOE, paths, tmp_path / "alone")
    for name, path in paths.items():
        assert tensor_bytes(tmp_path / "again" / name / path.name) == tensor_bytes(path), f"from {name}"
        check([rank[name][1] for rank in by_rank], alone[name][1])
