"""`init_from` of a Hugging Face folder: every field and tensor is used, known to be harmless, or refused by
name."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ndtrain.checkpoint.pretrained import check_folder, load_weights, model_folder, read_model
from ndtrain.config import ConfigError, load_config, resolve
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.model import tensor_shapes
from ndtrain.model.families.hf_config import from_hf, read_hf_config, to_hf
from ndtrain.model.families.hf_fields import unknown_fields
from ndtrain.parallel.build import build_stages
from tests.lib.parity import Run, assemble, owned
from tests.model.test_families import (
    FAMILIES,
    LLAMA,
    LLAMA3_ROPE,
    MISTRAL,
    MIXTRAL,
    MOONLIGHT,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SIZES,
    write,
)

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


def refused(call: Callable) -> str:
    """The one line of error that `call` raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    return line


# --------------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("name", FAMILIES)
def test_from_hf_reads_published_and_current_spelling(name):
    """The published config.json and the one that transformers writes today give the same model, without unknown
    fields."""
    today = transformers.AutoConfig.for_model(**FAMILIES[name]).to_dict()
    assert from_hf(FAMILIES[name]) == from_hf(today)
    assert unknown_fields(FAMILIES[name]) == unknown_fields(today) == []


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_from_hf_has_defaults_of_transformers(kind):
    shape = {k: SIZES[k] for k in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    shape |= {"hidden_size": 64, "num_attention_heads": 32}
    theirs, m = transformers.AutoConfig.for_model(kind, **shape), from_hf({"model_type": kind} | shape)
    same = [
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
    ]
    assert {k: getattr(m, k) for k in same} == {k: getattr(theirs, k) for k in same}
    width = getattr(theirs, "qk_head_dim", None) or getattr(theirs, "head_dim", None) or 2
    assert m.head_dim == width and m.rope_scaling is None
    assert m.rope_theta == theirs.rope_parameters["rope_theta"]
    assert m.sliding_window == getattr(theirs, "sliding_window", None)
    assert [m.attention_bias, m.mlp_bias] == [getattr(theirs, k, False) for k in ("attention_bias", "mlp_bias")]


@pytest.mark.parametrize("where", ["beside", "in rope_parameters"])
def test_from_hf_refuses_glm_with_partial_rotary(where):
    """If config.json does not set the factor, transformers rotates half of each head."""
    shape = {k: SIZES[k] for k in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    silent = shape | {"model_type": "glm4_moe", "hidden_size": 64, "num_attention_heads": 32}
    assert transformers.AutoConfig.for_model(**silent).rope_parameters["partial_rotary_factor"] == 0.5
    whole = {"partial_rotary_factor": 1.0}
    m = from_hf(silent | (whole if where == "beside" else {"rope_parameters": whole | {"rope_theta": 10000.0}}))
    assert transformers.AutoConfig.for_model(**to_hf(m)).rope_parameters["partial_rotary_factor"] == 1
    assert (m.num_experts, m.num_experts_per_tok, m.n_shared_experts, m.rms_norm_eps) == (128, 8, 1, 1e-5)
    for half in (silent, silent | {"partial_rotary_factor": 0.5}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5"):
            from_hf(half)


HARMLESS = {
    "other words for silu": {"hidden_act": "swish"},
    "how it was pre-trained": {"pretraining_tp": 4},
    "no scaling in the older words": {"rope_scaling": {"type": "default"}},
    "theta in both": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    "whole heads are rotated": {"partial_rotary_factor": 1.0},
    "nothing is quantised": {"quantization_config": None, "num_local_experts": 0, "per_layer_config": {}},
    "head_dim is what it would be": {"head_dim": None},
    "no window anywhere": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "a window that is not used": {"sliding_window": 64, "use_sliding_window": False},
    "a base model": {"architectures": ["LlamaModel"]},
    "no architecture": {"architectures": None},
    "a field of no table": {"favourite_colour": "blue"},
}


@pytest.mark.parametrize("patch", HARMLESS.values(), ids=HARMLESS)
def test_from_hf_ignores_harmless_fields(patch):
    assert from_hf(LLAMA | patch) == from_hf(LLAMA)


def test_check_folder_reports_unknown_fields(tmp_path):
    plain_folder(tmp_path, {"favourite_colour": "blue", "no_colour": None})
    (line,) = check_folder(tmp_path, from_hf(read_hf_config(tmp_path)))
    assert "favourite_colour" in line and str(tmp_path) in line and "no_colour" not in line


def test_from_hf_reads_sliding_window():
    windows = lambda base, **patch: from_hf(base | patch).sliding_window
    assert windows(MISTRAL) == 24 and windows(MISTRAL, sliding_window=None) is None
    assert windows(QWEN2, sliding_window=9) is None
    assert windows(QWEN2, sliding_window=9, use_sliding_window=True) is None  # from layer 28 of 2
    assert windows(QWEN3, sliding_window=9, use_sliding_window=True, max_window_layers=0) == 9
    slides = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    assert windows(QWEN3, sliding_window=9, **slides) == 9


def test_from_hf_llama3_rope_takes_length_from_config():
    short = {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}
    length = lambda **patch: from_hf(LLAMA | {"rope_scaling": short} | patch).rope_scaling[
        "original_max_position_embeddings"
    ]
    assert length() == 512 and length(original_max_position_embeddings=128) == 128


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED_FIELDS = {  # what is changed in which config.json -> what the line must say
    "another architecture": (LLAMA, {"model_type": "gpt2"}, ["model_type=gpt2", "llama, mistral, mixtral"]),
    "no architecture": (SIZES, {}, ["model_type=None", "llama"]),
    "families mixed up": (LLAMA, {"model_type": "qwen3_moe"}, ["architectures=", "Qwen3MoeForCausalLM"]),
    "two numbers of experts": (
        QWEN3_MOE, {"num_local_experts": 4}, ["num_local_experts=4", "contradicts num_experts=6"],
    ),
    "experts in words": (MIXTRAL, {"num_local_experts": "4"}, ["num_experts=4", "int"]),
    "layers in words": (QWEN3_MOE, {"mlp_only_layers": "0"}, ["mlp_only_layers=0", "list"]),
    "no biases of Qwen2's experts": (QWEN2_MOE, {"qkv_bias": False}, ["qkv_bias=False", "qwen2_moe", "True"]),
    "experts that jitter": (MIXTRAL, {"router_jitter_noise": 0.1}, ["router_jitter_noise=0.1"]),
    "windows of experts": (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 8}, ["sliding_window=8"]),
    "experts": (LLAMA, {"num_local_experts": 8}, ["num_local_experts=8"]),
    "a classifier": (LLAMA, {"architectures": ["LlamaForTokenClassification"]}, ["architectures=", "LlamaForCausalLM"]),
    "activation": (LLAMA, {"hidden_act": "gelu"}, ["hidden_act=gelu", "silu"]),
    "dropout": (MISTRAL, {"attention_dropout": 0.1}, ["attention_dropout=0.1", "null"]),
    "partial rotation": (QWEN2, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "1"]),
    "quantised": (LLAMA, {"quantization_config": {"bits": 4}}, ["quantization_config={'bits': 4}"]),
    "differing layers": (LLAMA, {"per_layer_config": {"1": {"head_dim": 4}}}, ["per_layer_config"]),
    "capped logits": (LLAMA, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
    "capped scores": (LLAMA, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
    "biases of Mistral": (MISTRAL, {"attention_bias": True}, ["attention_bias=True", "mistral"]),
    "MLP biases of Qwen": (QWEN3, {"mlp_bias": True}, ["mlp_bias=True", "qwen3"]),
    "yarn cut off": (LLAMA, {"rope_scaling": YARN | {"truncate": False}}, ["rope_scaling", "truncate=False", "yarn"]),
    "half a yarn": (QWEN3, {"rope_parameters": YARN | {"factor": None}}, ["rope_parameters", "yarn", "factor"]),
    "dynamic": (
        LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "default, linear, llama3, yarn"]
    ),
    "another score of experts": (MOONLIGHT, {"scoring_func": "softmax"}, ["scoring_func=softmax", "sigmoid"]),
    "another choice of experts": (MOONLIGHT, {"topk_method": "greedy"}, ["topk_method=greedy", "noaux_tc"]),
    "latents of Llama": (
        LLAMA, {"model_type": "deepseek_v3"}, ["architectures=", "deepseek_v3", "DeepseekV3ForCausalLM"]
    ),
    "Llama's name of latents": (MOONLIGHT, {"model_type": "llama"}, ["architectures=", "LlamaForCausalLM"]),
    "partial rotation today": (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["rotary_factor=0.5"]),
    "rotation by kinds": (LLAMA, {"rope_parameters": {"full_attention": {}}}, ["full_attention"]),
    "half a llama3": (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["low_freq_factor"]),
    "factor in words": (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor=2", "number"]),
    "two scalings": (
        LLAMA, {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, ["contradicts"],
    ),
    "two thetas": (LLAMA, {"rope_parameters": {"rope_theta": 10000.0}}, ["rope_theta", "contradicts"]),
    "two lengths": (
        LLAMA | {"rope_scaling": LLAMA3_ROPE}, {"original_max_position_embeddings": 128},
        ["original_max_position_embeddings=128", "256"],
    ),
    "window of Llama": (LLAMA, {"sliding_window": 64}, ["sliding_window=64", "null"]),
    "no window and one": (MISTRAL, {"use_sliding_window": False}, ["use_sliding_window=False", "sliding_window=24"]),
    "windows from layer 1": (
        QWEN2, {"use_sliding_window": True, "max_window_layers": 1}, ["max_window_layers=1", "same attention"]
    ),
    "mixed layers": (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "same"]),
    "linear layers": (QWEN3, {"layer_types": ["linear_attention"] * 2}, ["layer_types", "full_attention"]),
    "too few layers": (QWEN3, {"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
    "windows of no size": (QWEN3, {"layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_window=None"]),
    "no width": (LLAMA, {"hidden_size": None}, ["hidden_size is missing"]),
    "width in words": (LLAMA, {"hidden_size": "32"}, ["hidden_size=32", "int"]),
    "no heads": (LLAMA, {"num_attention_heads": 0}, ["num_attention_heads=0", "above 0"]),
    "uneven heads": (LLAMA, {"num_attention_heads": 5}, ["hidden_size=32", "num_attention_heads=5", "head_dim"]),
    "no true or false": (LLAMA, {"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "bool"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_from_hf_refuses_unsupported_field(name):
    base, patch, said = REFUSED_FIELDS[name]
    line = refused(lambda: from_hf(base | patch))
    assert all(word in line for word in ("init_from", *said)), line


# --------------------------------------------------------------------------------------------------------------- files


def plain_folder(folder: Path, patch: dict[str, Any] | None = None, dtype=torch.float32, shards: int = 1) -> dict:
    """A small model's folder, in one file or several with an index; its tensors."""
    config = LLAMA | (patch or {})
    write(folder, config)
    draw = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(from_hf(config))
    weights = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    save(folder, weights, shards)
    return weights


def save(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(weights, folder / "part", {"format": "pt"})
        (folder / "part").rename(folder / ONE)  # what was read from the old file may still be mapped
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(weights)}
    for file in names:
        save_file({n: t for n, t in weights.items() if where[n] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run on one process starts from."""
    cfg = load_config(["hardware.device=cpu", "train.seq_len=64"])
    cfg.model = from_hf(read_hf_config(folder))
    assert check_folder(folder, cfg.model) == []
    resolve(cfg, 1)
    mesh = Mesh(MeshSpec.of(cfg.mesh), 0, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    load_weights(folder, stages, mesh)
    return assemble([(Run(), list(owned(stages, "weight", lambda u: u.master)))]).tensors["weight"]


def assert_equal(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(t, wanted[n].float()) for n, t in actual.items())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_load_reads_files_of_every_precision(dtype, shards, tmp_path):
    wanted = plain_folder(tmp_path, dtype=dtype, shards=shards)
    assert_equal(loaded(tmp_path), wanted)


@pytest.mark.parametrize("shards", [1, 2])
def test_load_ignores_leftovers_and_tied_head(shards, tmp_path):
    wanted = plain_folder(tmp_path, {"tie_word_embeddings": True})
    head = {"lm_head.weight": torch.ones(131, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    (tmp_path / ONE).unlink()
    save(tmp_path, wanted | head, shards)
    assert_equal(loaded(tmp_path), wanted)


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_load_reads_base_model_without_head(shard, tmp_path):
    """`transformers` saves the model without its head under names that lack `model.`."""
    config = transformers.AutoConfig.for_model(**LLAMA | {"tie_word_embeddings": True, "torch_dtype": "float32"})
    base = transformers.AutoModel.from_config(config)
    base.save_pretrained(tmp_path, max_shard_size=shard)
    assert_equal(loaded(tmp_path), {f"model.{n}": t for n, t in base.state_dict().items()})


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: save(folder, {n: t for n, t in load_file(folder / ONE).items() if n != name})


def test_check_folder_names_missing_expert(tmp_path):
    plain_folder(tmp_path, QWEN3_MOE)
    m, expert = from_hf(read_hf_config(tmp_path)), "model.layers.1.mlp.experts.4.down_proj.weight"
    assert check_folder(tmp_path, m) == []
    without(expert)(tmp_path)
    line = refused(lambda: check_folder(tmp_path, m))
    assert f"tensor {expert} is missing" in line


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save(folder, load_file(folder / ONE) | {name: value})


def header(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Rewrites the header of the one file, whose tensors do not move."""

    def rewrite(folder: Path) -> None:
        data = (folder / ONE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / ONE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return rewrite


def index(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        body = json.loads((folder / INDEX).read_text())
        change(body["weight_map"])
        (folder / INDEX).write_text(json.dumps(body))

    return rewrite


REFUSED_FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {  # what happens to it -> what the line must say
    "no weights": (lambda f: (f / ONE).unlink(), [ONE, INDEX]),
    "pickled": (lambda f: (f / ONE).rename(f / "pytorch_model.bin"), ["pytorch_model.bin", "never", "save_pretrained"]),
    "a pointer": (
        lambda f: (f / ONE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        [ONE, "git lfs pull"],
    ),
    "empty": (lambda f: (f / ONE).write_bytes(b""), [ONE, "0 bytes"]),
    "not a file of tensors": (lambda f: (f / ONE).write_bytes(b"\xff" * 100), [ONE]),
    "truncated": (lambda f: (f / ONE).write_bytes((f / ONE).read_bytes()[:-9]), [ONE]),
    "tensors beyond the end": (header(lambda h: h[UP].update(data_offsets=[0, 1 << 40])), [ONE, UP]),
    "a size that does not fit": (header(lambda h: h[UP].update(shape=[1 << 40, 32])), [ONE, UP]),
    "no such precision": (with_tensor(UP, torch.ones(48, 32, dtype=torch.int8)), [UP, "I8", "BF16"]),
    "a tensor missing": (without(UP), [UP, "missing"]),
    "the head missing": (without("lm_head.weight"), ["lm_head.weight", "missing", "tie_word_embeddings"]),
    "another shape": (with_tensor(UP, torch.ones(47, 32)), [UP, "(47, 32)", "(48, 32)"]),
    "no place": (with_tensor(BIAS, torch.ones(32)), [BIAS, "is not part of the model", "llama"]),
    "a layer too many": (
        with_tensor("model.layers.2.input_layernorm.weight", torch.ones(32)),
        ["model.layers.2.input"],
    ),
}
REFUSED_SHARDS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a file missing": (lambda f: (f / SECOND).unlink(), [SECOND, "missing", INDEX]),
    "an index that does not parse": (lambda f: (f / INDEX).write_text("{"), [INDEX, "does not parse"]),
    "an index of something else": (lambda f: (f / INDEX).write_text('{"weights": 1}'), [INDEX, "does not parse"]),
    "an empty index": (index(lambda m: m.clear()), [INDEX, "does not parse"]),
    "an index that leads astray": (index(lambda m: m.update({BIAS: SECOND})), [INDEX, SECOND, "does not contain it"]),
    "an index out of the folder": (index(lambda m: m.update({UP: "../x.safetensors"})), ["../x.safetensors"]),
    "a tensor twice": (lambda f: save_file(load_file(f / FIRST), f / SECOND), [FIRST, SECOND, "again in"]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED_FILES, *REFUSED_SHARDS])
def test_check_folder_refuses_bad_weight_files(name, tmp_path):
    damage, said = (REFUSED_FILES | REFUSED_SHARDS)[name]
    plain_folder(tmp_path, shards=3 if name in REFUSED_SHARDS else 1)
    m = from_hf(read_hf_config(tmp_path))
    assert check_folder(tmp_path, m) == []
    damage(tmp_path)
    line = refused(lambda: check_folder(tmp_path, m))
    assert all(word in line for word in (f"init_from={tmp_path}", *said)), line


IMPOSSIBLE = {  # what config.json says -> what the line must say
    "layers": (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "contain 21 tensors"]),
    "layers with windows": (
        QWEN2, {"num_hidden_layers": 10**9, "use_sliding_window": True, "sliding_window": 8}, ["max_window_layers"]
    ),
    "experts": (MIXTRAL, {"num_local_experts": 10**9}, ["1000000000 each", "tensors"]),
    "layers without experts": (QWEN3_MOE, {"mlp_only_layers": [0] * 9}, ["mlp_only_layers", "more layers"]),
    "width": (LLAMA, {"hidden_size": 10**30, "head_dim": 8}, ["hidden_size", "must be a number below"]),
    "widths": (LLAMA, {"hidden_size": 10**14, "intermediate_size": 10**14}, ["100000000000000 and 100000000000000"]),
    "no number": (LLAMA, {"rms_norm_eps": math.nan}, ["rms_norm_eps=nan", "must be a number"]),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_read_model_refuses_sizes_absent_from_files(name, tmp_path):
    """The check comes before any list of layers or experts, which would take hours and all memory."""
    base, patch, said = IMPOSSIBLE[name]
    plain_folder(tmp_path, base)
    assert read_model(tmp_path) == from_hf(base, name=tmp_path.name)
    write(tmp_path, base | patch)
    line = refused(lambda: read_model(tmp_path))
    assert all(word in line for word in ("init_from", *said)), line


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_load_refuses_non_finite_weight_by_name(value, dtype, tmp_path):
    weights = plain_folder(tmp_path, dtype=dtype, shards=3)
    weights[UP].view(-1)[-1] = value
    save(tmp_path, weights, 3)
    line = refused(lambda: loaded(tmp_path))
    file = json.loads((tmp_path / INDEX).read_text())["weight_map"][UP]
    assert f"init_from={tmp_path}: tensor {UP} has elements that are not finite" in line and file in line, line


def test_load_accepts_large_finite_weights(tmp_path):
    weights = plain_folder(tmp_path)
    weights[UP].fill_(3e38)  # their sum is infinite
    save(tmp_path, weights)
    assert_equal(loaded(tmp_path), weights)


@pytest.mark.parametrize("read", [check_folder, lambda folder, m: loaded(folder)], ids=["headers", "elements"])
def test_unreadable_weight_file_is_named(read, tmp_path):
    plain_folder(tmp_path, shards=3)
    m, real_open, real_read = from_hf(read_hf_config(tmp_path)), open, os.preadv
    broken = OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if path.endswith(SECOND):
            raise broken

    opening = lambda file, *args, **more: (fail(file), real_open(file, *args, **more))[1]
    reading = lambda fd, *args: (fail(fd), real_read(fd, *args))[1]
    patch = {"builtins.open": opening} if read is check_folder else {"os.preadv": reading}
    ((name, replacement),) = patch.items()
    with mock.patch(name, replacement):
        line = refused(lambda: read(tmp_path, m))
    assert f"init_from={tmp_path}" in line and f"{SECOND} cannot be read (Input/output error)" in line, line


def test_model_folder_resolves_run_and_checkpoint_folders(tmp_path, monkeypatch):
    """A model folder resolves to itself, a run folder to its newest checkpoint. Other names are not guessed."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "run/checkpoints/step-00000004",
        "run/checkpoints/step-00000012",
        "run/checkpoints/.writing-step-00000020",
    ):
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text("{}")
    newest = Path("run/checkpoints/step-00000012")
    assert {model_folder("run"), model_folder("run/checkpoints"), model_folder(str(newest))} == {newest}
    assert model_folder(str(tmp_path / "run")) == tmp_path / newest
    Path("new/checkpoints").mkdir(parents=True)
    for name, words in {
        "new": ["init_from=new", "no checkpoint yet", "checkpoint.every"],
        "gpt2": ["init_from=gpt2", "`hf download gpt2 --local-dir models/gpt2`", "set init_from=models/gpt2"],
        "org/name-1.5": ["`hf download org/name-1.5 --local-dir models/name-1.5`"],
    }.items():
        line = refused(lambda name=name: model_folder(name))
        assert all(word in line for word in words), line
    for path in ("/no/such", "./here", "a/b/c"):  # no names on the hub: what reads config.json says what is missing
        assert model_folder(path) == Path(path)


def test_read_hf_config_refuses_adapter_and_non_object(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it" in refused(lambda: read_hf_config(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "does not parse" in refused(lambda: read_hf_config(tmp_path))
