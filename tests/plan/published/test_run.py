"""Rows of published measurements as runs of ndtrain."""

import pytest

from lab.published.run import run_of
from ndtrain.config import ConfigError
from ndtrain.model.flops import parameter_count

ROW = {
    "source": "a page", "model": "", "params_b": "", "layers": "8", "hidden": "512", "heads": "8", "kv_heads": "",
    "ffn": "2048", "vocab": "1024", "seq_len": "256", "global_batch_seqs": "64", "micro_batch": "2", "vpp": "",
    "gpu": "H100-80GB-SXM", "peak_tflops": "989.5", "gpus": "16", "dp": "4", "fsdp": "1", "tp": "2", "pp": "2",
    "cp": "1", "schedule": "1F1B", "recompute": "none", "precision": "bf16", "zero_stage": "0", "notes": "",
}  # fmt: skip


def of(**cells: str):
    return run_of(ROW | cells)


MODELS = {  # name and sizes -> (family, whether tied), as their publications have it
    "llama3": (("llama3-8b", 8.03, 32, 4096, 32, 8, 14336, 128256, 8192), ("llama", False)),
    "gpt3": (("GPT-175B", 175, 96, 12288, 96, 0, 49152, 51200, 2048), ("gpt", True)),
    "learned positions": (("MPT-1b", 1.446, 24, 2048, 16, 16, 8192, 50368, 65536), ("gpt", True)),
    "a gate four times as wide": (("llama-arch", 1.342, 16, 2048, 32, 32, 8192, 131072, 4096), ("llama", True)),
    "untied": (("llama-arch", 8.858, 32, 4096, 32, 32, 14336, 131072, 4096), ("llama", False)),
    "no name, a gate by its size": (("ours", 6.74, 32, 4096, 32, 32, 11008, 32000, 4096), ("llama", False)),
    "no name, no gate by its size": (("ours", 6.7, 32, 4096, 32, 32, 16384, 50257, 2048), ("gpt", True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gate_and_tied_embeddings_follow_from_parameter_count(name):
    (model, billions, layers, hidden, heads, kv_heads, ffn, vocab, length), (family, tied) = MODELS[name]
    made = of(
        model=model, params_b=str(billions), layers=str(layers), hidden=str(hidden), heads=str(heads), ffn=str(ffn),
        kv_heads=str(kv_heads or ""), vocab=str(vocab), seq_len=str(length),
    ).model  # fmt: skip
    assert (made.model_type, made.tie_word_embeddings) == (family, tied)
    positions = length * hidden if "positions" in name else 0
    assert (parameter_count(made) + positions) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_ungated_mlp_has_two_matrices():
    cfg = of(model="GPT").config()
    gated = of(model="llama").config()
    assert parameter_count(gated.model) - parameter_count(cfg.model) == 8 * 512 * 2048 + 1024 * 512


@pytest.mark.parametrize(
    "zero, dp, fsdp, mesh",
    [
        ("0", "4", "1", (4, 1, 1)),
        ("1", "4", "1", (1, 4, 1)),
        ("3", "2", "2", (2, 2, 3)),
        ("", "1", "4", (1, 4, 3)),
        ("2", "4", "4", (1, 4, 2)),
        ("1", "", "", (1, 4, 1)),
        ("ZeRO-1", "4", "0", (1, 4, 1)),
    ],
)
def test_sharded_data_parallelism_is_fsdp(zero, dp, fsdp, mesh):
    """Both columns may name one axis, or none of them may be given."""
    made = of(zero_stage=zero, dp=dp, fsdp=fsdp).config().mesh
    assert (made.dp, made.fsdp, made.zero) == mesh and (made.tp, made.pp, made.cp) == (2, 2, 1)


SCHEDULES = {
    "": ("1f1b", 1),
    "1F1B": ("1f1b", 1),
    "1F1B-I": ("interleaved", 2),
    "interleaved-1F1B": ("interleaved", 2),
    "Interleaved 1F1B (VPP)": ("interleaved", 2),
    "ZB-1p": ("zb_h1", 1),
    "ZB-2p": ("zb_v", 2),
    "ZBV": ("zb_v", 2),
    "DualPipeV": ("dualpipe_v", 2),
    "GPipe": ("gpipe", 1),
}


@pytest.mark.parametrize("stated", SCHEDULES)
def test_schedule_column_maps_to_schedule_name(stated):
    name, chunks = SCHEDULES[stated]
    made = of(schedule=stated, vpp="2" if name == "interleaved" else "").config().schedule
    assert (made.name, made.chunks) == (name, chunks)


def test_vpp_makes_1f1b_interleaved_only_with_pipeline():
    assert of(vpp="4").config().schedule.name == "interleaved"
    alone = of(pp="1", dp="8", vpp="4", schedule="none").config()
    assert (alone.schedule.name, alone.schedule.chunks, alone.mesh.pp) == ("1f1b", 1, 1)


def test_recompute_precision_and_notes_set_configuration():
    cfg = of(recompute="full", precision="amp_bf16", notes="eager; NO sequence parallel; grad-accum 4").config()
    assert (cfg.recompute.name, cfg.precision.compute, cfg.train.compile) == ("full", "bf16", "false")
    assert not cfg.tp.sequence_parallel and cfg.microbatches == 8
    assert of(source="HF nanotron").config().train.compile == "false" and of().config().train.compile == "true"
    assert of().config().train.loss_chunk >= 2 * 256, "other trainers make all logits at once"
    assert of(precision="FP8 (delayed scaling)").config().precision.compute == "fp8"
    selective = of(recompute="selective (attention)").config().recompute
    assert selective.name == "selective" and "core" not in selective.keep and "gate_up_proj" in selective.keep
    every_second = of(recompute="selective", notes="SAC (every-2nd-matmul op-level)").config().recompute
    assert "core" in every_second.keep and "gate_up_proj" not in every_second.keep


def test_gpu_column_and_notes_set_hardware():
    h = of(gpu="H200-141GB (4 per node)", peak_tflops="989", notes="HBM 4.7TB/s; 400Gb/s RDMA per GPU").hardware
    assert (h.gpus_per_node, h.memory_gb, h.memory_gb_s, h.network_gb_s) == (4, 141 * 2**30 / 1e9, 4700, 50)
    assert h.peak_tflops["bf16"] == 989
    h = of(gpu="NVIDIA A100 80GB", peak_tflops="", notes="4x Omni-Path 100Gb/s per node").hardware
    assert (h.peak_tflops["bf16"], h.network_gb_s, h.link_gb_s) == (312, 6.25, 300)
    assert of(gpu="H100", notes="node-node: 1600Gb/s RoCE/node").hardware.network_gb_s == 25
    measured = of(gpu="H100", notes="AllReduce 160.4 intra 450.1 GB/s").hardware
    assert measured.network_gb_s == 50 and measured.rates["network"] == pytest.approx(160.4 / 8 / 50)
    assert of(gpu="H100", notes="AllReduce 24.3 intra 427.4 GB/s").hardware.rates["network"] == 0.25, (
        "not of large messages"
    )
    assert of(gpu="H100", notes="AllReduce 458.8 intra 458.1 GB/s").hardware.network_gb_s == 50, "of one host"
    assert of(gpu="H100", notes="14.5 samples/s").hardware.network_gb_s == 50
    h = of(gpu="H100", peak_tflops="1979", precision="fp8").hardware
    assert (h.peak_tflops["bf16"], h.peak_tflops["fp8"]) == (989.5, 1979)
    assert of(gpu="A800", peak_tflops="").hardware.link_gb_s == 200


REFUSALS = {
    "no such device": ({"gpu": "TPUv4"}, "gpu=TPUv4: no description of this device; known: a100"),
    "no device": ({"gpu": ""}, "gpu=: no description of this device"),
    "missing": ({"layers": ""}, "layers is missing"),
    "no number": ({"hidden": "4k"}, "hidden=4k: must be a positive number"),
    "no whole number": ({"layers": "8.5"}, "layers=8.5: must be a whole number"),
    "experts": ({"params_b": "3"}, "params_b=3: a dense decoder of these sizes has 0.0"),
    "experts by name": ({"model": "Mixtral-8x7B"}, "Mixtral: models with experts are not supported"),
    "experts by notes": ({"notes": "top 2 of 8 experts"}, "8 experts: models with experts are not supported"),
    "mesh": ({"dp": "3"}, "gpus=16 are not dp x fsdp x tp x pp x cp = 3 x 1 x 2 x 2 x 1"),
    "schedule": ({"schedule": "wavefront"}, "schedule=wavefront: ndtrain has no equivalent"),
    "zero": ({"zero_stage": "4"}, "zero_stage=4: must be 0, 1, 2 or 3"),
    "fp8": ({"gpu": "A100", "precision": "fp8"}, "precision=fp8: gpu=A100 has no fp8 matmuls"),
    "stages": ({"vpp": "8", "schedule": "1F1B"}, "more than its model.num_hidden_layers=8"),
    "batch": ({"micro_batch": "3"}, "train.global_batch=64 must be a multiple of"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_inexpressible_row_is_one_line_error(name):
    cells, said = REFUSALS[name]
    with pytest.raises(ConfigError) as error:
        of(**cells).config()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_nanotron_split_fills_stages_to_equal_cost():
    """16 layers and a head that costs 4 layers, as in its runs of 1.34 billion parameters."""
    model = {"model": "llama", "layers": "16", "hidden": "2048", "heads": "32", "ffn": "8192", "vocab": "131072"}
    split = lambda pp: of(**model, source="nanotron", pp=str(pp), dp="1", gpus="").overrides["schedule.split"]
    assert split(2) == [10, 6] and split(4) == [5, 5, 5, 1] and split(8) == [3, 2, 3, 2, 3, 2, 1, 0]
    assert "schedule.split" not in of(**model, pp="2").overrides


def test_note_removes_layer_from_first_and_last_stage():
    """Zero Bubble's runs have 22 layers in 24 chunks. The first and the last chunk have no layer."""
    cells = {"layers": "22", "pp": "8", "dp": "1", "tp": "1", "gpus": "8", "notes": "first/last stage one layer fewer"}
    split = lambda **more: of(**(cells | more)).overrides.get("schedule.split")
    assert split() == [2, *[3] * 6, 2] and split(vpp="3") == [0, *[1] * 22, 0]
    assert split(layers="24") is None and split(schedule="ZB-V") is None, "the layers do not come out even"
    assert of(**cells, vpp="3").plan().program.schedule.stages == 24
