"""Words of other trainers bring up the key that they mean."""

import re
from pathlib import Path

import pytest

from ndtrain.config import ConfigError, conf_dir, load_config, resolve
from ndtrain.config.foreign_names import _MEANINGS, _VALUES, meaning_of
from ndtrain.config.keys import group_options, known_keys
from tests.lib.helpers import refusal

HOWTO = Path(__file__).parents[2] / "docs/howto"

MEANT = {  # override -> what the error must contain
    "optim.learning_rate=1e-3": "did you mean 'optim.lr'?",
    "learning_rate=1e-3": "did you mean 'optim.lr'?",
    "lr=1e-3": "did you mean 'optim.lr'?",
    "train.warmup=10": "did you mean 'optim.warmup'?",
    "training.seq_len=10": "did you mean 'train.seq_len'?",
    "tp=2": "did you mean 'mesh.tp'?",
    "dp_shard=2": "did you mean 'mesh.fsdp'?",
    "parallelism.tensor_parallel_degree=2": "did you mean 'mesh.tp'?",
    "parallelism.dp=2": "did you mean 'mesh.dp'?",
    "per_device_train_batch_size=2": "did you mean 'train.micro_batch'?",
    "gradient_accumulation_steps=2": "use train.global_batch (the number of microbatches",
    "training.local_batch_size=2": "use train.global_batch (each rank has",
    "max_steps=2": "did you mean 'train.steps'?",
    "num_train_epochs=2": "did you mean 'train.epochs'",
    "activation_checkpoint.mode=full": "did you mean 'recompute'?",
    "gpus=64": "use ranks=N or nodes=N for a plan",
    "precision.compute=fp16": "did you mean 'bf16'?",
    "precision.params=bf16": "use precision.compute=bf16",
    "optim.schedule=warmup_stable_decay": "did you mean 'wsd'?",
    "schedule=Interleaved1F1B": "did you mean 'interleaved'?",
    "data=huggingface": "did you mean 'hf'?",
    "mesh.fsdq=2": "did you mean 'mesh.fsdp'?",  # spelling still counts
}


@pytest.mark.parametrize("override", MEANT)
def test_foreign_key_error_suggests_our_key(override):
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(["recipe=llama_debug", override]), 1)
    assert MEANT[override] in str(caught.value)


FLAGS = {  # arguments -> the error
    "--recipe llama_debug": "--recipe: write an override without dashes: recipe=llama_debug",
    "--train.steps=5": "--train.steps: write an override without dashes: train.steps=5",
    "--tensor-model-parallel-size 2": "--tensor-model-parallel-size: no such flag; did you mean 'mesh.tp'? an override "
    "is key=value, without dashes",
    "--multirn": "--multirn: no such flag; did you mean '--multirun'?",
}


@pytest.mark.parametrize("words", FLAGS)
def test_foreign_flag_error_suggests_override(words, capsys):
    assert refusal(capsys, words.split()).removeprefix("error: ").startswith(FLAGS[words])


def mentioned(text: str) -> set[str]:
    """The keys and groups in a text of ours."""
    groups, keys = group_options([conf_dir()]), known_keys()
    words = {word.rstrip(".") for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text)}
    return {word for word in words if "." in word or word in groups or (word in keys and word != "run")} & {
        *groups,
        *keys,
    }


def test_every_suggested_key_and_value_exists():
    groups, keys = group_options([conf_dir()]), known_keys()
    for meaning, names in _MEANINGS.items():
        head = meaning.partition(";")[0]
        words = {key for key, _ in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)(=|\b)", head)}
        words |= set(re.findall(r"(?:^| )([a-z_]+)(?==)", head)) - {"ranks", "nodes"}
        known = {word for word in words if word in groups or word in keys or keys[word.rpartition(".")[0]].free_form}
        assert words == known, meaning
        assert words or head in groups or head in keys or head.startswith("ranks="), f"{meaning} names no key"
        assert not {name for name in names.split() if name in keys and not keys[name].section}, (
            f"{meaning}: a key of ours"
        )


def test_every_foreign_name_has_one_meaning():
    for table in (_MEANINGS, _VALUES):
        names = [name for names in table.values() for name in names.split()]
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def said_on(page: Path) -> dict[str, set[str]]:
    """Name of another trainer -> the keys of ours that the tables of a page say of it."""
    said: dict[str, set[str]] = {}
    for line in page.read_text().splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 2 and all(cell.strip().startswith("`") for cell in cells):
            names = [re.fullmatch(r"-*([\w.-]+)(?:[ =].*)?", name) for name in re.findall(r"`([^`]+)`", cells[0])]
            for name in filter(None, names):
                said.setdefault(name[1].replace("-", "_").lower(), set()).update(mentioned(cells[1]))
    values = {*_VALUES, *" ".join(_VALUES.values()).split(), "freq"}  # freq: a name that a page has shortened
    return {name: keys for name, keys in said.items() if keys and name not in values}


@pytest.mark.parametrize("page", sorted(HOWTO.glob("from_*.md")), ids=lambda page: page.stem)
def test_migration_pages_agree_with_table(page):
    """The table has each option that a page translates, and maps it to one of the keys that the page names."""
    said = said_on(page)
    assert len(said) >= 15, "the tables of the page are not found"
    for name, keys in said.items():
        hint = meaning_of(name, known_keys())
        assert hint, f"{page.name} translates {name} to {keys}, the table lacks it"
        assert mentioned(hint) & keys, f"{name}: {page.name} says {keys}, the table {hint}"
