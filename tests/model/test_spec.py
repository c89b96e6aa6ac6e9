"""The records of parameters and ops: what they say of every shipped model, and that nothing else takes names apart."""

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import ndtrain
from ndtrain.config import load_config, resolve
from ndtrain.model import flops, params, tensor_shapes
from ndtrain.model.block import Block, dim_elements
from ndtrain.model.spec import CORE, OpSpec
from ndtrain.model.transformer import all_ops, block_ops
from tests.lib.stages import RankStages

ROOT = Path(ndtrain.__file__).parent


# ------------------------------------------------------------------------------------------------- the shipped models

STORED = json.loads((Path(__file__).parent / "declared.json").read_text())
FAMILIES = {
    "llama": [], "mistral": [], "qwen2": [], "qwen3": [], "mixtral": [], "olmoe": [],
    "qwen2_moe": ["model.shared_expert_intermediate_size=24", "model.decoder_sparse_step=2"],
    "qwen3_moe": ["model.moe_intermediate_size=16"],
    "glm4_moe": ["model.n_shared_experts=2", "model.first_k_dense_replace=1"],
    "deepseek_v3": [
        "model.n_shared_experts=1", "model.first_k_dense_replace=1", "model.kv_lora_rank=8", "model.q_lora_rank=12",
        "model.qk_nope_head_dim=8", "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.num_key_value_heads=4",
    ],
}  # fmt: skip
SIZES = [
    "model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=3", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.head_dim=null", "model.vocab_size=64",
]  # fmt: skip
EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2"]


def overrides_of(name: str) -> list[str]:
    """A model of `conf/model`, or a small one of a family."""
    kind, _, of = name.partition(" ")
    if kind == "model":
        return [f"model={of}"]
    experts = EXPERTS if of in ("mixtral", "olmoe") or "moe" in of or of == "deepseek_v3" else []
    return ["model=llama_debug", f"model.model_type={of}", *SIZES, *experts, *FAMILIES[of]]


def declared(name: str) -> dict:
    """What the records say of a model, as numbers that a file can store."""
    m = resolve(load_config(overrides_of(name)), 1).model
    shapes = tensor_shapes(m)
    rows = [[*p._replace(init=p.init.name)[:-1], shapes[p.name]] for p in params(m).values()]
    return {
        "parameters": flops.parameter_count(m),
        "tensors": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "op_flops": {str(i): flops.op_flops(m, 128, i) for i in (0, m.num_hidden_layers - 1)},
        "flops_per_token": flops.flops_per_token(m, 128),
        "hardware": flops.hardware_flops_per_token(m, 128, [frozenset({"core", "down_proj"}), None]),
    }


SAMPLE = {"model llama3_8b", *(name for name in STORED if name.startswith("family"))}


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.full) for n in STORED])
def test_declared_records_equal_stored_ones(name):
    """Compared are names, order, dims, shapes, units, layers, experts, ops and initial values of tensors, and FLOPs.
    The stored values are from before the records were introduced."""
    assert declared(name) == STORED[name]


def test_every_shipped_model_has_stored_records():
    shipped = {f"model {path.stem}" for path in (ROOT.parent / "conf" / "model").glob("*.yaml")}
    assert shipped <= STORED.keys(), "add it to declared.json as `declared` says it"


# --------------------------------------------------------------------------------------------- against what is computed


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v3"])
def test_saved_results_have_sizes_of_op_table(family):
    sizes = ["train.seq_len=8", "train.micro_batch=2", "train.global_batch=2", "recompute=selective"]
    rank = RankStages.build([*overrides_of(f"family {family}"), *sizes])
    m, stages = rank.cfg.model, rank.stages
    elements = dim_elements(m)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    ctx, x_NE = stages.context(tokens, tokens, torch.float32), torch.ones(16, m.hidden_size)
    blocks = [segment for _, segment in stages.in_order if segment.is_block]
    for i, block in enumerate(blocks):
        ops = {op.name: op for op in block_ops(m, i) if op.savable}
        for unit in block.units:
            stages.units.unshard(unit)
        with torch.no_grad(), stages.saved_ops.saving("sizes", frozenset(ops)):
            block.run(x_NE, ctx)
        for name, nbytes in stages.saved_ops.drop("sizes").items():
            rows = 16 * (m.num_experts_per_tok if ops[name].routed else 1)
            softmax = m.num_attention_heads if name == CORE else 0  # the logarithm of each softmax's denominator
            assert nbytes == 4 * rows * (sum(elements[dim] for dim in ops[name].outputs) + softmax), (i, name)


# ------------------------------------------------------------------------------------------------ mistakes of a block


class Misspelt(Block):
    @classmethod
    def mlp_ops(cls, m, family):
        _, down = super().mlp_ops(m, family)
        return OpSpec("up_proj", (("mlp.upp_proj",),)), down


def test_op_of_missing_projection_is_refused(monkeypatch):
    m = resolve(load_config([]), 1).model
    monkeypatch.setattr("ndtrain.model.transformer.block_class", lambda m, index: Misspelt)
    with pytest.raises(ValueError, match=r"op up_proj: the block has no mlp\.upp_proj\.weight: correct"):
        block_ops(m)


# ------------------------------------------------------------------------------------------------------ no names

# what declares ops, and the names of a dense layer's projections
WRITES_NAMES = {"config/schema.py", "checkpoint/upcycling.py"}
ALSO_KEYS = {"experts"}  # a named dim is called so, too
TAKE_APART = {"startswith", "endswith", "split", "partition", "rpartition", "removeprefix", "removesuffix", "find"}
OF_A_PARAMETER = re.compile(r"layers|experts|_proj|norm|embed|lm_head|\.w[123]\b|\.bias|\.weight")


@cache
def op_names() -> frozenset[str]:
    overrides = ["model=llama_debug"], ["model=deepseek_v3"]
    return frozenset(op.name for o in overrides for op in all_ops(resolve(load_config(o), 1).model))


@cache
def trees() -> dict[str, ast.Module]:
    """The package's files below its folder, as they parse."""
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}


def name_tests(code: ast.Module, ops: frozenset[str]) -> list[str]:
    """What code does with a literal that is the name of an op, or a part of a parameter's name: it compares or looks it
    up, or takes a name apart by it."""
    found = []
    for node in ast.walk(code):
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=args) if method in TAKE_APART:
                found += [text for text in strings(args) if OF_A_PARAMETER.search(text)]
            case ast.Compare(left=left, comparators=others):
                found += [t for t in strings([left, *others]) if t in ops or t.startswith((".layers", ".experts"))]
            case ast.Set(elts=names) | ast.Subscript(slice=ast.Tuple(elts=names)):
                found += [t for t in strings(names) if t in ops]
            case ast.Subscript(slice=name) | ast.MatchValue(value=name):
                found += [t for t in strings([name]) if t in ops - ALSO_KEYS]
            case ast.Dict(keys=names):
                found += [t for t in strings([n for n in names if n]) if t in ops - ALSO_KEYS]
    return found


def strings(nodes: list[ast.expr]) -> list[str]:
    """The literals among some expressions, those in tuples and sets too."""
    of = lambda n: n.elts if isinstance(n, ast.Tuple | ast.Set | ast.List) else [n]
    return [n.value for node in nodes for n in of(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_no_code_parses_parameter_or_op_names():
    for here, tree in trees().items():
        found = name_tests(tree, op_names())
        assert not found, f"{here} tests a name for {found[0]!r}: read the field of its `Param` or `OpSpec` instead"


def test_op_names_are_written_only_in_blocks():
    """Names of one word may mean other things."""
    ops = {op for op in op_names() if "_" in op}
    for here, tree in trees().items():
        literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        found = set() if here.startswith("model/") or here in WRITES_NAMES else ops & literals
        assert not found, f"{here} has the name {found}: read it from an `OpSpec` instead"


@pytest.mark.parametrize(
    "source",
    [
        'writes = name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))',
        'flops = 1 if op == "o_proj" else 0',
        'by_tp = {"o_proj", LAST}',
        'sizes = {"qkv_proj": 1}',
        'is_block = ".layers." in units[0]',
        '_, among, rest = name.partition(".experts.")',
        'seconds = times["core"]',
        'match op:\n    case "combine":\n        pass',
    ],
)
def test_name_tests_finds_code_that_parses_names(source):
    assert name_tests(ast.parse(source), op_names())
