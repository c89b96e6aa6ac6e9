"""A checkpoint of a mixture of experts, resumed on another mesh."""

import pytest

from tests.checkpoint.test_checkpoint_matrix import SAVED, check, ranks_of, resume, write
from tests.lib.helpers import tensor_bytes
from tests.lib.ranks import run_ranks

MOE = [
    "model.model_type=qwen2_moe", "model.num_experts=6", "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=20", "model.shared_expert_intermediate_size=24", "model.mlp_only_layers=[1]",
]  # fmt: skip
MESHES = {
    "fsdp2": ["mesh.fsdp=2"], "pp2-tp2": ["mesh.pp=2", "mesh.tp=2", "schedule=zb_h1"],
    "dp2-fsdp2-cp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.cp=2", "mesh.zero=1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "source"),
    [("fsdp2", "pp2-tp2"), *(pytest.param(t, s, marks=pytest.mark.full) for t in MESHES for s in MESHES if t != s)],
)
def test_resumed_on_another_mesh(target, source, tmp_path):
    """Saved again, its bytes are the same, and the next step is that of one process."""
    run_ranks(write, ranks_of(MESHES[source]), [*MOE, *MESHES[source]], str(tmp_path / "source"))
    paths = {"source": tmp_path / "source" / f"step-{SAVED:08d}"}
    by_rank = run_ranks(resume, ranks_of(MESHES[target]), [*MOE, *MESHES[target]], paths, tmp_path / "again")
    ((alone,),) = [run_ranks(resume, 1, MOE, paths, tmp_path / "alone")]
    assert tensor_bytes(tmp_path / "again/source" / paths["source"].name) == tensor_bytes(paths["source"])
    check([rank["source"][1] for rank in by_rank], alone["source"][1])
