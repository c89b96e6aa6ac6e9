"""`train.sample_every`: every mesh writes what the plain model writes."""

import json

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.samples import Sampler
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import Transformer
from ndtrain.parallel.build import build_stages, initialise, weights_only
from ndtrain.train import main
from tests.lib.helpers import arguments, refusal, rows, write_corpus
from tests.lib.parity import FP64
from tests.lib.ranks import run_ranks
from tests.parallel.test_parity_tp_cp import MODEL, PACKED, TIED

FULL = pytest.mark.full
RUN = [*MODEL, *FP64, "model.num_hidden_layers=4", "train.micro_batch=2"]
MESHES = {
    "one": [], "fsdp2": ["mesh.fsdp=2"], "dp2-fsdp2": ["mesh.dp=2", "mesh.fsdp=2"], "tp2": ["mesh.tp=2"],
    "tp2-whole-stream": ["mesh.tp=2", "tp.sequence_parallel=false"],
    "tp2-whole-vocabulary": ["mesh.tp=2", "layout.rules.vocab=null"], "cp2": ["mesh.cp=2"],
    "cp2-striped": ["mesh.cp=2", "cp.balance=striped"], "pp2": ["mesh.pp=2"],
    "pp2-zb_v": ["mesh.pp=2", "schedule=zb_v"],
    "pp2-cp2-tp2": ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2"], "full-recompute": ["mesh.fsdp=2", "recompute=full"],
    "compile": ["mesh.fsdp=2", "train.compile=true"], "offload": ["mesh.fsdp=2", "optim.offload=true"],
}  # fmt: skip
RANKS = {name: 2 ** sum(o.startswith("mesh.") for o in overrides) for name, overrides in MESHES.items()}
PROMPTS = [[5, 9, 77], [1], [3] * 4 + [50, 60], [8, 8], [100, 2, 3, 4]]
NEW = 6


def sampled(overrides: list[str]) -> list[list[int]]:
    rank, _, world = world_from_env()
    cfg = resolve(load_config([*RUN, *overrides]), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    return Sampler(cfg, mesh, stages, len(PROMPTS)).run(PROMPTS, NEW, None, 0.0, 0)


def plain(overrides: list[str]) -> list[list[int]]:
    """One process that holds the whole model, one forward for each token."""
    cfg = resolve(load_config([*RUN, *overrides]), 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh, weights_only(cfg.mesh.zero, cfg.precision))
    initialise(stages, cfg.run.seed)
    model = stages.models[0]
    assert isinstance(model, Transformer)
    texts = [list(p) for p in PROMPTS]
    with torch.no_grad():
        for text in texts:
            for _ in range(NEW):
                text.append(int(model.logits(torch.tensor([text]))[0, -1].argmax()))
    return [text[len(p) :] for text, p in zip(texts, PROMPTS, strict=True)]


def cases():
    for name in MESHES:
        for other in (False, True):
            sample = (name, other) == ("pp2", True)
            yield pytest.param(name, (PACKED, TIED) * other, marks=[] if sample else [FULL], id=f"{name}{'-x' * other}")


@pytest.mark.parametrize(("name", "variant"), list(cases()))
def test_samples_are_same_on_every_mesh(name, variant):
    want = plain(list(variant))
    assert len({tuple(w) for w in want}) > 2, "the texts must differ"
    for got in run_ranks(sampled, RANKS[name], [*MESHES[name], *variant]):
        assert got == want


def test_run_writes_samples_and_trains_as_without(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.txt")
    plan = ["train.steps=5", "train.sample_every=2", "train.sample_prompts=[the quick,'']", "train.sample_tokens=6"]
    assert main(arguments(tmp_path / "run", corpus, *plan)) == 0
    made = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in made] == [(n, p) for n in (2, 4, 5) for p in ("the quick", "")]
    assert "step 4  sample: 'the quick' -> " in capsys.readouterr().out
    assert main(arguments(tmp_path / "without", corpus, "train.steps=5")) == 0
    assert [r["loss"] for r in rows(tmp_path / "run")] == [r["loss"] for r in rows(tmp_path / "without")]


def test_sample_every_without_tokenizer_is_refused(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.txt")
    (tmp_path / "tokens.bin").write_bytes(bytes(4000))
    bin_ = ["data=bin", f"data.path={tmp_path / 'tokens.bin'}", "train.sample_every=2"]
    said = refusal(capsys, arguments(tmp_path / "run", corpus, *bin_))
    assert said.startswith("train.sample_every=2: the data has no tokenizer")
