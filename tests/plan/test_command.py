"""The command `ndtrain plan`: its tables, its JSON, and one line for each mistake."""

import json

import pytest

from ndtrain.config import AXES
from ndtrain.plan.__main__ import main
from ndtrain.plan.hardware import known_hardware, load_hardware
from ndtrain.run.commands import PLANS
from ndtrain.run.completion import candidates

RUN = ["dry", "recipe=llama_debug", "hardware=h100"]


def test_plan_of_gpu_mesh_prints_table_and_writes_json(tmp_path, capsys, recwarn):
    args = [*RUN, "nodes=2", "mesh.pp=2", "mesh.fsdp=4", "mesh.tp=2", "mesh.zero=3", "precision.compute=bf16"]
    assert main([*args, "train.compile=false", f"json={tmp_path}/plan.json"]) == 0
    out = capsys.readouterr().out
    assert "16 ranks of h100: pp=2 fsdp=4 tp=2" in out and "; attention by flash" in out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {p["stages"][0] for p in plan["plans"]} == {0, 1} and plan["mesh"]["fsdp"] == 4
    ops = {(t["axis"], t["op"]) for p in plan["plans"] for t in p["traffic"]}
    assert {("tp", "all_gather"), ("fsdp", "reduce_scatter"), ("pp", "send")} <= ops
    assert all(part in AXES for axis, _ in ops for part in axis.split("+")), "a lane or a pair is taken for an axis"
    assert not [w for w in recwarn if "timeout" in str(w.message)]


@pytest.mark.full
def test_plan_counts_offloaded_state_as_host_memory(tmp_path, capsys):
    peaks = []
    for offload in ("false", "true"):
        args = [*RUN, "ranks=2", "mesh.fsdp=2", "rank=0", f"optim.offload={offload}", f"json={tmp_path}/plan.json"]
        assert main(args) == 0
        plan = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
        peaks.append(plan["peak_bytes"])
        assert "; compiled" in capsys.readouterr().out
    assert peaks[1] < peaks[0] and plan["state"]["host: optimizer state"] > 0


MISTAKES = {
    "hardware": (["dry", "recipe=llama_debug", "hardware=h10"], "did you mean 'h100'?"),
    "no hardware": (["dry", "recipe=llama_debug"], "hardware is missing"),
    "plan": (["dri"], "dri: no such plan; did you mean 'dry'?"),
    "rank": ([*RUN, "ranks=2", "mesh.fsdp=2", "rank=2"], "rank=2: there are 2 ranks, 0 to 1"),
    "no rank": ([*RUN, "rank=-1"], "rank=-1: must be a rank"),
    "mesh": ([*RUN, "nodes=1", "mesh.tp=3"], "mesh tp=3 needs 3 ranks but 8 started"),
    "rest": ([*RUN, "mesh.fsdp=-1"], "mesh.fsdp=-1 takes the rest"),
    "both": ([*RUN, "nodes=1", "ranks=8"], "give only one of them"),
    "key": ([*RUN, "mesh.tpp=2"], "did you mean 'mesh.tp'?"),
    "fp64": ([*RUN, "precision.params=fp64"], "precision.params=fp64: a GPU accumulates fp64 gradients"),
    "nested": (["dry", "recipe=llama_debug", "hardware=NESTED.yaml"], "cannot be read (it is not YAML)"),
    "fp8": (["dry", "recipe=llama_debug", "hardware=a100", "precision.compute=fp8"], "has no fp8 matmuls"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_argument_is_one_line_error(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "NESTED.yaml").write_text("[" * 5000)
    args, text = MISTAKES[name]
    assert main(args) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


def test_shipped_hardware_files_load():
    assert known_hardware() == ["a100", "b200", "cpu", "h100", "h200"]
    for name in known_hardware():
        hardware = load_hardware(name)
        assert hardware.device == "cpu" or hardware.peak_tflops["bf16"] > hardware.peak_tflops["fp32"]


def test_completion_offers_plans_and_keys():
    assert candidates("ndtrain plan ") == list(PLANS) and "mesh.tp=" in candidates("ndtrain plan dry mesh.t")
