"""The recipes of published models: each has the published number of parameters, and fits on the GPUs of its rows in
docs/recipes.md."""

import re
import shlex
from pathlib import Path

import pytest

import ndtrain
from ndtrain.config import Config, load_config, resolve
from ndtrain.model.flops import parameter_count
from ndtrain.plan.dry import dry_run, plan_alike
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.steady import with_microbatches

PAGE = (Path(ndtrain.__file__).parent.parent / "docs" / "recipes.md").read_text()
BESIDES = 4e9  # for what no tensor holds: CUDA's context, NCCL's buffers, fragmentation
PARAMETERS = {  # overrides -> parameters of the Hugging Face model, tied ones once
    "recipe=qwen3_0_6b": 596_049_920,
    "recipe=qwen3_1_7b": 1_720_574_976,
    "recipe=qwen3_4b": 4_022_468_096,
    "recipe=qwen3_8b": 8_190_735_360,
    "recipe=qwen3_14b": 14_768_307_200,
    "recipe=qwen3_32b": 32_762_123_264,
    "recipe=llama3_2_3b": 3_212_749_824,
    "recipe=mistral_7b": 7_241_732_096,
    "recipe=continued model=llama3_2_1b": 1_235_814_400,
    "recipe=continued model=llama3_8b": 8_030_261_248,
    "recipe=continued model=llama3_70b": 70_553_706_496,
}
ROWS = {  # "the overrides on N" -> (GPUs, overrides): the table of the page
    f"{words} on {gpus}": (int(gpus), shlex.split(words))
    for gpus, words in re.findall(r"^\| [^|]+ \| (\d+) \| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
}


def config(row: str) -> Config:
    gpus, words = ROWS[row]
    return resolve(load_config(words), gpus)


@pytest.mark.parametrize("words", PARAMETERS)
def test_recipe_has_published_number_of_parameters(words):
    assert parameter_count(load_config(words.split()).model) == PARAMETERS[words]


def test_every_documented_recipe_has_counted_parameters():
    listed = {" ".join(w for w in words if w.startswith(("recipe=", "model="))) for _, words in ROWS.values()}
    assert listed <= set(PARAMETERS) and len(listed) >= 10 and {gpus for gpus, _ in ROWS.values()} == {1, 8, 64}


@pytest.mark.full
def test_recipes_use_small_learning_rate():
    for words in PARAMETERS:
        cfg = load_config(words.split())
        assert cfg.optim.lr <= 5e-5 and cfg.precision.compute == "bf16" and cfg.mesh.fsdp == -1


def fits(row: str) -> None:
    """Each kind of rank. Two microbatches have the peak of more: the first one of a step has no gradients to add to."""
    cfg, hardware = config(row), load_hardware("h100")
    assert cfg.mesh.pp == 1
    for ranks in plan_alike(cfg):
        record = dry_run(with_microbatches(cfg, 2), ranks[0], "cuda")
        assert record.compiled and record.attention == "flash"
        assert sum(record.state.values()) < record.peak_bytes < 1e9 * hardware.memory_gb - BESIDES


@pytest.mark.full
def test_smallest_recipe_fits_on_one_gpu():
    fits(next(row for row in ROWS if row.startswith("recipe=qwen3_0_6b") and row.endswith(" on 1")))


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS)
def test_every_documented_recipe_fits(row):
    fits(row)
