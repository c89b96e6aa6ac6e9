"""DiLoCo between islands of different meshes equals the same algorithm in one process."""

import pytest
import torch
from safetensors import safe_open

from tests.islands.runs import Islands, island_arguments
from tests.lib.diloco import reference
from tests.lib.helpers import checkpoint_of, rows, write_corpus

STEPS, OUTER_LR, OUTER_MOMENTUM = 14, 0.7, 0.8
CASES = {  # the meshes of the islands, and further overrides
    "tp and one process": (["tp", "one"], ["islands.codec=int8", "islands.fragments=2", "islands.delay=1"]),
    "not rounded": (["fsdp", "pp"], []),
    "bf16": (["cp", "one"], ["islands.codec=bf16"]),
    "int4 in fragments": (["tp", "fsdp", "one"], ["islands.codec=int4", "islands.fragments=4"]),
    "zero 1, tied embeddings, ema": (
        ["dp", "tp"],
        ["mesh.zero=1", "model.tie_word_embeddings=true", "optim.ema=0.9", "islands.codec=int8", "islands.delay=3"],
    ),
    "experts": (["ep", "one"], ["model=moe_debug", "moe.balance=none", "islands.codec=int8"]),
}
BY_DEFAULT = "tp and one process"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == BY_DEFAULT else pytest.mark.full) for case in CASES]
)
def test_diloco_of_different_meshes_equals_one_process(case, tmp_path):
    meshes, more = CASES[case]
    own = [
        "islands.sync=diloco", "islands.inner_steps=4", f"islands.outer_lr={OUTER_LR}",
        f"islands.outer_momentum={OUTER_MOMENTUM}", *more,
    ]  # fmt: skip
    args = island_arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), STEPS, *own)
    wanted = reference(tmp_path, args, len(meshes), (OUTER_LR, OUTER_MOMENTUM))
    names = dict(zip("abc", meshes, strict=False))
    with Islands(tmp_path, args, names) as islands:
        for name in names:  # one after the other, so that the first one has the first rows
            islands.start(name)
            islands.wait_for_door()
        islands.wait()
    for name in names:
        assert [row["step"] for row in rows(tmp_path / name)] == list(range(1, STEPS + 1))
        with safe_open(checkpoint_of(tmp_path / name, STEPS) / "model.safetensors", "pt") as saved:
            assert set(saved.keys()) == set(wanted)
            for tensor, whole in wanted.items():
                torch.testing.assert_close(saved.get_tensor(tensor), whole, rtol=1e-9, atol=1e-10, msg=tensor)
