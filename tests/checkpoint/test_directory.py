"""The folder of checkpoints: which is older, and what state.json may say."""

import json
from pathlib import Path

import pytest

from ndtrain.checkpoint.directory import file_problems, list_checkpoints, older_checkpoints, read_state, set_aside_later
from ndtrain.checkpoint.elements import FORMAT, DamagedCheckpoint, digest, sha256

BODY = {
    "format": FORMAT, "step": 4, "tokens": 9, "skipped": 0, "order": {}, "stream": None, "config": {}, "files": {},
    "sha256": {}, "checksums": {},
}  # fmt: skip


def write_state(folder: Path, **fields) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    body = BODY | fields
    (folder / "state.json").write_text(json.dumps(body | {"digest": digest(body)}))
    return folder


def test_file_problems_checks_files_in_subfolders(tmp_path):
    path = write_state(tmp_path / "step-00000004", sha256={"templates/one.jinja": sha256(b"x")})
    assert list(file_problems(path, read_state(path))) == [("templates/one.jinja", "templates/one.jinja is missing")]
    (path / "templates").mkdir()
    (path / "templates" / "one.jinja").write_text("x")
    assert not list(file_problems(path, read_state(path)))


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "", ".", "a//b", "a\0b"])
@pytest.mark.parametrize("key", ["files", "sha256"])
def test_read_state_refuses_paths_outside_checkpoint(key, name, tmp_path):
    value = {"files": [1, "x"], "sha256": "x"}[key]
    with pytest.raises(DamagedCheckpoint, match=f"state.json has no valid {key}"):
        read_state(write_state(tmp_path / "step-00000004", **{key: {name: value}}))


@pytest.mark.parametrize("name", ["step-00000005", "step-000000004", "step-99999999999999999999"])
def test_read_state_refuses_step_other_than_folder_name(name, tmp_path):
    with pytest.raises(DamagedCheckpoint, match=f"{name} holds step 4: rename the folder to step-00000004"):
        read_state(write_state(tmp_path / name))
    assert read_state(write_state(tmp_path / "best"))["step"] == 4, "a user's own name says no step"


def test_list_checkpoints_sorts_steps_of_nine_digits(tmp_path):
    names = ["step-100000000", "step-99999999", "step-00000004"]
    first, second, third = (write_state(tmp_path / name) for name in names)
    assert list_checkpoints(tmp_path) == [first, second, third]
    assert older_checkpoints(first) == [second, third] and older_checkpoints(second) == [third]
    set_aside_later(second)
    assert list_checkpoints(tmp_path) == [second, third] and (tmp_path / f"superseded-{first.name}").is_dir()
