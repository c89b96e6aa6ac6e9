"""A step on a mesh against `transformers` on one process: the same weights, tokens and documents."""

from functools import cache

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from ndtrain.config import load_config, resolve
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import params
from ndtrain.model.families.hf_config import to_hf
from ndtrain.model.init import fill
from ndtrain.model.vocabulary import IGNORE
from tests.lib.parity import FP64, SHAPE, distance, make_batches, train
from tests.model.test_transformers import lift

RUN = [
    *SHAPE, *FP64, "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=10",
    "train.seq_len=64", "train.global_batch=8", "train.micro_batch=2", "train.steps=1", "model.initializer_range=0.1",
]  # fmt: skip
MESHES = {
    "tp2": {"tp": 2}, "cp2": {"cp": 2}, "tp2cp2": {"tp": 2, "cp": 2}, "fsdp2tp2": {"fsdp": 2, "tp": 2},
    "fsdp2cp2tp2": {"fsdp": 2, "cp": 2, "tp": 2},
}  # fmt: skip
FULL = pytest.mark.full
SAMPLE = ("tp2cp2",)  # the rest takes --full


def seen(documents, length: int) -> torch.Tensor:
    """[B, 1, T, T]: which keys each query sees, from where the documents of each row start."""
    rows = []
    for starts in documents:
        of = torch.bucketize(torch.arange(length), torch.tensor(starts), right=True)
        rows.append((of[:, None] == of) & torch.ones(length, length, dtype=torch.bool).tril())
    return torch.stack(rows)[:, None]


@cache
def theirs(packed: bool, lifted: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole global batch."""
    cfg = resolve(load_config([*RUN, f"data.pack={str(packed).lower()}", "train.micro_batch=8"]), 1)
    hf = transformers.AutoConfig.for_model(**to_hf(cfg.model))
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa").double()
    table = params(cfg.model)
    for name, p in model.named_parameters():
        fill(p.data.view(-1), cfg.model, cfg.run.seed, table[name], 0)
    if lifted:
        lift(model, cfg.model)
    (batch,) = make_batches(cfg, Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu")), 1, "uneven")
    extra = {}
    if packed:
        extra = {"position_ids": batch.positions, "attention_mask": seen(batch.documents, cfg.train.seq_len)}
    logits = model(input_ids=batch.tokens, use_cache=False, **extra).logits
    loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", ignore_index=IGNORE)
    loss = loss / (batch.labels != IGNORE).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("lifted", [pytest.param(False, marks=FULL), True], ids=["as-is", "lifted"])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=FULL), True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[FULL] * (n not in SAMPLE)) for n in MESHES])
def test_loss_and_gradients_on_mesh_equal_transformers(name, packed, lifted):
    sizes = MESHES[name]
    ranks = torch.tensor(list(sizes.values())).prod().item()
    mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    run = train(ranks, [*RUN, *mesh, f"data.pack={str(packed).lower()}"], "uneven")
    loss, gradients = theirs(packed, lifted)
    bound = 1e-9 if lifted else 1e-6
    assert abs(run.losses[0] - loss) < bound
    ours = run.tensors["gradient"]
    assert ours.keys() == gradients.keys()
    off = {n: distance(ours[n], gradients[n]) for n in ours}
    worst = max(off, key=off.get)
    assert off[worst] < bound, f"gradient of {worst} is off by {off[worst]:.1e}"
