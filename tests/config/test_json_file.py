"""JSON of a folder that somebody else wrote: it is read as data, or refused in one line that names the file."""

import pytest

from ndtrain.config import ConfigError, json_file
from ndtrain.config.json_file import read_object

REFUSED = {  # content of the file -> what the line must say
    "no JSON": (b'{"a": ', "does not parse: Expecting value"),
    "no object": (b"[1]", "does not parse: it is not a JSON object"),
    "no UTF-8": (b'{"a": "\xff"}', "does not parse: 'utf-8' codec"),
    "nested beyond the parser": (b'{"a": ' + b"[" * 100_000, "does not parse: it is nested too deeply"),
    "nested within the parser": (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "does not parse: it is nested too deeply"),
    "half a character": (b'{"a": "\\ud800"}', "does not parse: 'utf-8' codec can't encode"),
    "half a character in a name": (b'{"a": {"\\ud800": 1}}', "does not parse: 'utf-8' codec can't encode"),
    "a number of many digits": (b'{"a": ' + b"9" * 10_000 + b"}", "does not parse: Exceeds the limit"),
    "too long": (b'{"a": "' + b"x" * 100 + b'"}', "does not parse: it has more than 100 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_object_refuses_invalid_content(name, tmp_path, monkeypatch):
    content, said = REFUSED[name]
    path = tmp_path / "some.json"
    path.write_bytes(content)
    if name == "too long":
        monkeypatch.setattr(json_file, "_LONGEST", 100)
    with pytest.raises(ConfigError) as refused:
        read_object(path)
    line = str(refused.value)
    assert line.startswith(str(path)) and said in line and line.isprintable(), line


def test_read_object_names_a_file_that_cannot_be_read(tmp_path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read .{why}"):
            read_object(path)


def test_read_object_returns_the_object(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"a": [{"b": null}, 1.5, "\\u00e9"], "c": true}')
    assert read_object(path) == {"a": [{"b": None}, 1.5, "é"], "c": True}
