"""Prepared tokens in an object store give a training all that those on a disk do, also through failing requests."""

import random
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from ndtrain.config import Config, ConfigError, DataConfig, to_config
from ndtrain.config.store import folder_at
from ndtrain.data import open_data
from ndtrain.data.prepare import prepare
from ndtrain.train import main
from tests.lib import s3
from tests.lib.helpers import arguments, one_error, rows, write_corpus


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder of several shards, with a validation split."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(12):
        write_corpus(corpus / f"{n:02}.txt", words=300 + n)
    data = DataConfig(
        name="text", path=str(corpus), tokenizer="byte", validation=0.3, cache=str(tmp_path / "cache"), vocab_size=257
    )
    manifest = prepare(data, tmp_path / "tokens", workers=1, shard_bytes=3000)
    assert len(manifest.files["train"]) > 4 and len(manifest.files["validation"]) > 1
    return tmp_path / "tokens"


def upload(folder: Path, address: str) -> None:
    for path in folder.iterdir():
        (folder_at(address) / path.name).write_bytes(path.read_bytes())


@pytest.fixture
def stored(prepared):
    address = "memory://bucket/tokens"
    upload(prepared, address)
    yield address
    folder_at("memory://bucket").remove_all()


def config(path, **data) -> Config:
    data = {"name": "bin", "path": str(path), **data}
    return to_config(OmegaConf.create({"data": data, "model": {"vocab_size": 300}, "train": {"seq_len": 16}}))


def assert_same_tokens(address: str, folder: Path, slices: int = 60) -> None:
    ours, theirs, draw = open_data(config(address)), open_data(config(folder)), random.Random(0)
    assert ours.fingerprint == theirs.fingerprint and ours.tokenizer.digest() == theirs.tokenizer.digest()
    for one, other in [
        *zip(ours.train, theirs.train, strict=True),
        *zip(ours.validation, theirs.validation, strict=True),
    ]:
        assert len(one) == len(other) and one.dtype == other.dtype
        for _ in range(slices):
            start = draw.randrange(len(other))
            stop = start + draw.choice([0, 1, 17, 4000])
            assert np.array_equal(one[start:stop], other[start:stop])


def test_tokens_in_a_store_equal_those_on_disk(stored, prepared):
    assert_same_tokens(stored, prepared)


def test_run_on_tokens_in_a_store_equals_run_on_disk(stored, prepared, tmp_path):
    for name, path in (("disk", prepared), ("store", stored)):
        more = ["data=bin", f"data.path={path}", "train.eval_every=2", "train.steps=4", "data.tokenizer=byte"]
        assert main(arguments(tmp_path / name, tmp_path, *more)) == 0
    losses = [[(r["loss"], r.get("eval_loss")) for r in rows(tmp_path / name)] for name in ("disk", "store")]
    assert losses[0] == losses[1] and any(eval_loss for _, eval_loss in losses[0])


def test_failing_requests_change_no_token(prepared):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    address = f"s3://{s3.BUCKET}/tokens"
    with s3.running() as server:
        upload(prepared, address)
        server.fail(0.1)
        assert_same_tokens(address, prepared, slices=40)
        assert server.fail(0.0) > 5, "no request failed"


def test_missing_and_damaged_shards_are_named(stored, prepared):
    shard = folder_at(stored) / "train-00002.bin"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ConfigError, match=r"data.path=memory://bucket/tokens: train-00002.bin is missing: the"):
        open_data(config(stored))
    for damaged, why in ((content[:-10], "has only"), (b"\xff" * len(content), "holds an id above 256")):
        shard.write_bytes(damaged)
        (tokens,) = open_data(config(stored)).train
        with pytest.raises(OSError, match=rf"{why}.*train-00002.bin"):
            tokens[:]


WRONG = {
    "data=text data.path=memory://bucket/tokens": "only prepared tokens are read from an object store",
    "data=jsonl data.path=memory://bucket/tokens": "only prepared tokens are read from an object store",
    "data=bin data.path=memory://bucket/nothing": "only prepared tokens are read from an object store",
    "data=megatron data.path=memory://bucket/tokens": "only prepared tokens are read from an object store",
    "data=bin data.path=nostore://bucket/tokens": "no package for nostore://",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_other_data_in_a_store_is_refused(overrides, stored, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", tmp_path, *overrides.split())) == 2
    assert WRONG[overrides] in one_error(capsys.readouterr().err)
