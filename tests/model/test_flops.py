"""FLOPs against figures worked out by hand."""

import pytest

from ndtrain.config import ModelConfig, load_config, resolve
from ndtrain.model import flops

TINY = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
# q and o are 8 x 24 each, k and v 8 x 12, gate, up and down 8 x 12
TINY_BLOCK = 2 * 192 + 2 * 96 + 3 * 96


def model(name: str) -> ModelConfig:
    return resolve(load_config([f"model={name}"]), world_size=1).model


def tiny(**changes) -> ModelConfig:
    return ModelConfig(**{**vars(TINY), **changes})


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("llama_small", 9_965_824),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("deepseek_v3", 671_026_404_352),
    ],
)
def test_parameter_count_equals_published_counts(name, count):
    assert flops.parameter_count(model(name)) == count


@pytest.mark.parametrize(
    ("changes", "vectors"),
    [
        ({}, 16),
        ({"attention_bias": True}, 16 + 24 + 2 * 12 + 8),
        ({"mlp_bias": True}, 16 + 2 * 12 + 8),
        ({"model_type": "qwen2"}, 16 + 24 + 2 * 12),
        ({"model_type": "qwen3"}, 16 + 2 * 6),
    ],
)
def test_block_parameters_include_biases_and_norms(changes, vectors):
    assert flops.block_parameters(tiny(**changes)) == TINY_BLOCK + vectors


def test_parameter_count_equals_built_model():
    """The description and the code that builds the model agree, for each kind of model."""
    torch = pytest.importorskip("torch")
    from ndtrain.model import Transformer

    for changes in (
        {},
        {"tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"attention_bias": True, "mlp_bias": True},
    ):
        m = tiny(**changes)
        with torch.device("meta"):
            built = Transformer(m, range(m.num_hidden_layers), True, True)
        assert sum(p.numel() for p in built.parameters()) == flops.parameter_count(m), changes


def test_matmul_parameters_include_head_if_tied_or_not():
    for tied in (False, True):
        assert flops.matmul_parameters(tiny(tie_word_embeddings=tied)) == 3 * TINY_BLOCK + 80


def test_flops_per_token_equals_hand_calculation():
    assert flops.flops_per_token(TINY, 100) == 6 * (3 * TINY_BLOCK + 80) + 12 * 3 * 4 * 6 * 100
    # Llama 3.1 8B at 8192 tokens: 6 x 7,504,658,432 + 12 x 32 x 32 x 128 x 8192
    assert flops.flops_per_token(model("llama3_8b"), 8192) == 45_027_950_592 + 12_884_901_888


def test_flops_per_token_is_sum_of_blocks_and_head():
    forward = 3 * flops.block_flops(TINY, 100) + flops.head_flops(TINY)
    assert flops.flops_per_token(TINY, 100) == 3 * forward


def test_op_flops_add_up_to_block():
    """q and o are 8 x 24, k and v 8 x 12, gate, up and down 8 x 12; scores and values 24 x 100 each."""
    assert flops.op_flops(TINY, 100) == {
        "qkv_proj": 2 * (192 + 2 * 96), "core": 4 * 24 * 100, "o_proj": 2 * 192, "gate_up_proj": 2 * 2 * 96,
        "down_proj": 2 * 96,
    }  # fmt: skip
    assert flops.block_flops(TINY, 100) == 2 * TINY_BLOCK + 4 * 4 * 6 * 100


FORWARD = 2 * TINY_BLOCK + 4 * 4 * 6 * 100
TAIL = frozenset({"down_proj"})


@pytest.mark.parametrize(
    ("skipped_ops", "again"),
    [
        ([None] * 3, 0),  # recompute=none
        ([TAIL] * 3, 3 * (FORWARD - 192)),  # full: nothing reads a block's output again
        ([frozenset(), TAIL, TAIL], 3 * FORWARD - 2 * 192),  # every=2
        ([TAIL | {"core", "o_proj", "gate_up_proj"}] * 3, 3 * 2 * (192 + 2 * 96)),  # selective: q, k and v
        ([TAIL | {"core"}, None, None], FORWARD - 192 - 9600),  # budget
        ([frozenset()], 3 * FORWARD),  # one block stands for all
        ([], 0),
    ],
)
def test_hardware_flops_include_recompute(skipped_ops, again):
    assert flops.hardware_flops_per_token(TINY, 100, skipped_ops) == flops.flops_per_token(TINY, 100) + again


def test_elementwise_values_equal_hand_count():
    assert flops.elementwise_values(TINY) == 10 * 8 + 2 * (24 + 12) + 5 * 12
