"""safetensors files written in place: wrong headers are refused, and checksums of parts add up."""

import ctypes
import errno
import gc
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ndtrain.checkpoint import safetensors_reader
from ndtrain.checkpoint.checksum import checksum
from ndtrain.checkpoint.safetensors_io import DamagedFile, Rows, create, plan_files, write
from ndtrain.checkpoint.safetensors_reader import Reader

A, B = torch.arange(6, dtype=torch.float32).view(2, 3), torch.arange(4, dtype=torch.float64) + 100
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F64", "shape": [4], "data_offsets": [24, 56]},
}
DATA = A.numpy().tobytes() + B.numpy().tobytes()


def file_of(header: dict | bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def changed(name: str, **fields) -> dict:
    return HEADER | {name: HEADER[name] | fields}


def write_bytes(folder: Path, content: bytes, name: str = "file.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def whole(reader: Reader, name: str) -> Tensor:
    return reader.read(name, Rows(0, math.prod(reader.shape(name)))).view(reader.shape(name))


# ------------------------------------------------------------------------------------------------------ lying headers


LIES = {  # -> what is said about it
    "overlap": (file_of(changed("b", data_offsets=[16, 48])), "b overlaps"),
    "the same bytes": (file_of(changed("a", shape=[4], dtype="F64", data_offsets=[24, 56])), "overlaps"),
    "gap": (file_of(changed("b", data_offsets=[32, 64]), DATA + bytes(8)), "b overlaps the one before it, or leaves"),
    "beyond the end": (file_of(changed("b", shape=[5], data_offsets=[24, 64])), "b ends at byte"),
    "far beyond the end": (file_of(changed("b", shape=[2**40], data_offsets=[24, 24 + 2**43])), "b ends at byte"),
    "not to the end": (file_of(HEADER, DATA + bytes(4)), "4 bytes follow"),
    "negative": (file_of(changed("a", data_offsets=[-24, 0])), "-24 is not a whole number"),
    "backwards": (file_of(changed("a", data_offsets=[24, 0])), "a has offsets that do not fit"),
    "not a number": (file_of(changed("a", data_offsets=["0", "24"])), "a has a shape or offsets"),
    "true": (file_of(changed("a", shape=[True, 6])), "a has a shape or offsets"),
    "not whole": (file_of(changed("a", data_offsets=[0, 24.0])), "24.0 is not a whole number"),
    "NaN": (file_of(changed("a", data_offsets=[0, math.nan])), "NaN is not a whole number"),
    "three offsets": (file_of(changed("a", data_offsets=[0, 24, 24])), "a has a shape or offsets"),
    "negative size": (file_of(changed("a", shape=[-2, -3])), "-2 is not a whole number"),
    "another size": (file_of(changed("a", shape=[7])), "a has offsets that do not fit its shape (7,)"),
    "overflow": (file_of(changed("a", shape=[2**62, 2**62, 0], data_offsets=[0, 0])), "a has offsets"),
    "another dtype": (file_of(changed("a", dtype="F16")), "a has offsets that do not fit"),
    "no such dtype": (file_of(changed("a", dtype="F33")), "a has the dtype F33"),
    "no dtype": (file_of(HEADER | {"a": {"shape": [2, 3], "data_offsets": [0, 24]}}), "a does not have dtype"),
    "no entry": (file_of(HEADER | {"a": 3}), "a does not have dtype"),
    "twice": (file_of(json.dumps(HEADER).replace('"b"', '"a"').encode()), "a occurs twice"),
    "metadata": (file_of(HEADER | {"__metadata__": {"format": 1}}), "__metadata__"),
    "a list": (file_of(b"[]"), "header does not parse"),
    "no JSON": (file_of(json.dumps(HEADER).encode()[:-1]), "header does not parse"),
    "deep": (file_of(b'{"a":' + b"[" * 100_000), "header does not parse"),
    "no text": (file_of(b'{"\xff":1}'), "header does not parse"),
    "half a pair": (file_of(b'{"\\ud800":1}'), "header does not parse"),
    "huge length": (file_of(HEADER, length=2**63), "header does not fit"),
    "length to the end": (file_of(HEADER, length=len(json.dumps(HEADER)) + 57), "header does not fit"),
    "empty": (b"", "has 0 bytes"),
    "seven bytes": (bytes(7), "has 7 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_reader_refuses_wrong_header_by_name(lie, tmp_path):
    content, said = LIES[lie]
    path = write_bytes(tmp_path, content)
    with pytest.raises(DamagedFile) as refused:
        Reader([path])
    assert str(path) in str(refused.value) and said in str(refused.value)
    with pytest.raises(safetensors.SafetensorError):  # whatever is refused here, the library refuses too
        safetensors.deserialize(content)


def test_reader_refuses_tensor_in_two_files(tmp_path):
    paths = [write_bytes(tmp_path, file_of(HEADER), f"{i}.safetensors") for i in range(2)]
    with pytest.raises(DamagedFile, match=r"tensor a is in .*0.safetensors and again in .*1.safetensors"):
        Reader(paths)


def test_reader_allows_integer_tensors_but_does_not_read_them(tmp_path):
    tensors = {"a": A, "steps": torch.arange(3), "mask": torch.ones(5, dtype=torch.bool)}
    safetensors.torch.save_file(tensors, tmp_path / "file.safetensors")
    reader = Reader([tmp_path / "file.safetensors"])
    assert torch.equal(whole(reader, "a"), A) and sorted(reader.names()) == ["a", "mask", "steps"]
    with pytest.raises(DamagedFile, match="steps has the dtype I64"):
        whole(reader, "steps")


FIELDS = st.sampled_from(["dtype", "shape", "data_offsets", "other"])
SIZES = st.one_of(st.integers(-8, 64), st.sampled_from([2**31, 2**62, 2**64, 0.5, 24.0, True, "8", None]))
VALUES = st.one_of(
    st.sampled_from(["F64", "F32", "F16", "BF16", "I32", "U8", "X"]), st.lists(SIZES, max_size=3), SIZES, st.none()
)
EDITS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "__metadata__"]), FIELDS, VALUES), max_size=3)
SPOILS = st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2), st.integers(0, 2)), max_size=3)


@settings(max_examples=500)
@given(edits=EDITS, spoils=SPOILS, extra=st.sampled_from([0, 0, 0, 8, 1]), off=st.sampled_from([0, 0, 0, 1, -1, 60]))
def test_reader_equals_safetensors_for_random_headers(edits, spoils, extra, off, tmp_path_factory):
    header = {name: dict(entry) for name, entry in HEADER.items()}
    for name, field, value in edits:
        header.setdefault(name, {})[field] = value
    text = bytearray(json.dumps(header).encode())
    for at, replacement, removed in spoils:
        text[at : at + removed] = replacement
    content = file_of(bytes(text), DATA + bytes(extra), max(0, len(text) + off))
    path = write_bytes(tmp_path_factory.getbasetemp(), content, "mutated.safetensors")
    try:
        reader = Reader([path])
    except DamagedFile as error:
        assert str(path) in str(error)
        return
    theirs = {name: entry["data"] for name, entry in safetensors.deserialize(content)}
    assert theirs.keys() == set(reader.names())
    for name, expected in theirs.items():
        try:
            tensor = whole(reader, name)
        except DamagedFile as error:
            assert "dtype" in str(error)
        else:
            assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bytes(expected)


# ------------------------------------------------------------------------------------------------------ rows of files


@st.composite
def blocks(draw) -> tuple[int, Rows]:
    """(elements of a tensor, some of them)"""
    length, count, gap = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.integers(0, 9))
    rows = Rows(draw(st.integers(0, 9)), length, count, length + gap if count > 1 else 0)
    return rows.start + rows.span + draw(st.integers(0, 5)), rows


def indices(rows: Rows) -> Tensor:
    starts = rows.start + rows.stride * torch.arange(rows.number)
    return (starts[:, None] + torch.arange(rows.length)).view(-1)


@settings(max_examples=200)
@given(block=blocks(), most=st.integers(1, 50), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_rows_written_read_and_divided(block, most, dtype, tmp_path_factory):
    n, rows = block
    data = torch.arange(1, rows.numel + 1).to(dtype)
    (plan,) = plan_files("file", {"before": ((3,), dtype), "x": ((n,), dtype)}, 10**6)
    path = tmp_path_factory.getbasetemp() / "rows.safetensors"
    create(path, plan)
    with open(path, "r+b") as f:
        at = 0
        for part in rows.chunks(most):
            assert part.numel <= most
            write(f.fileno(), data[at : at + part.numel], plan.offsets["x"], part)
            at += part.numel
    expected = torch.zeros(n, dtype=dtype)
    expected[indices(rows)] = data
    assert torch.equal(safetensors.torch.load_file(path)["x"], expected)
    for gap, span in ((64 << 10, 1 << 20), (0, 1 << 20), (64 << 10, 64)):  # with the gaps, and piece by piece
        with mock.patch.object(safetensors_reader, "_GAP", gap), mock.patch.object(safetensors_reader, "_SPAN", span):
            reader = Reader([path])
            reader.expect("x", rows)
            assert torch.equal(reader.read("x", rows), data)
            into = torch.zeros(rows.numel + 2, dtype=dtype)
            assert reader.read("x", rows, into[1:-1]).data_ptr() == into[1:].data_ptr()
            assert torch.equal(into[1:-1], data) and into[0] == into[-1] == 0


# ---------------------------------------------------------------------------------------------------- broken reading


def test_reader_names_file_truncated_after_header(tmp_path):
    path = write_bytes(tmp_path, file_of(HEADER))
    reader = Reader([path])
    assert torch.equal(whole(reader, "a"), A)
    os.truncate(path, path.stat().st_size - 8)
    assert torch.equal(whole(reader, "a"), A)
    with pytest.raises(DamagedFile, match=f"{path} was truncated while it was read"):
        whole(reader, "b")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_read_error_of_elements_names_file(number, tmp_path):
    path = write_bytes(tmp_path, file_of(HEADER))
    reader = Reader([path])
    with mock.patch("os.preadv", side_effect=OSError(number, os.strerror(number))), pytest.raises(DamagedFile) as error:
        whole(reader, "a")
    assert str(error.value) == f"{path} cannot be read ({os.strerror(number)})"


def test_read_error_of_header_names_file(tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    for name, why in (("folder.safetensors", "Is a directory"), ("none.safetensors", "No such file")):
        with pytest.raises(DamagedFile, match=f"{tmp_path / name} cannot be read .{why}"):
            Reader([tmp_path / name])


def test_reader_refuses_elements_outside_tensor(tmp_path):
    reader = Reader([write_bytes(tmp_path, file_of(HEADER))])
    with pytest.raises(ValueError, match="outside tensor a"):
        reader.read("a", Rows(4, 3))


def test_a_reader_keeps_few_files_open(tmp_path):
    """A model has more files than a process may have open."""
    opened = lambda: len(os.listdir("/proc/self/fd"))
    paths = [write_bytes(tmp_path, file_of({f"a{i}": HEADER["a"]}, DATA[:24]), f"{i}.safetensors") for i in range(40)]
    gc.collect()  # what another test left open is not closed in between
    before = opened()
    reader = Reader(paths)
    for i in [*range(40), *range(40)]:
        assert torch.equal(whole(reader, f"a{i}"), A)
    assert opened() <= before + 16
    del reader
    assert opened() == before


# ----------------------------------------------------------------------------------------------------------- checksum


def defined(data: Tensor) -> list[int]:
    """The checksum by its definition, word by word."""
    raw = data.view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
    return [sum(words) % 2**64, sum(w * (i + 1) for i, w in enumerate(words)) % 2**64]


def modulo(sums: Tensor) -> list[int]:
    return [x % 2**64 for x in sums.tolist()]


@settings(max_examples=200)
@given(block=blocks(), scale=st.sampled_from([1, 2, 50, 1000]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_checksums_of_parts_add_up(block, scale, dtype):
    _, (start, length, count, stride) = block
    rows = Rows(start * scale, length * scale, count, stride * scale)
    whole = torch.zeros(rows.start + rows.span, dtype=dtype)
    data = torch.randn(rows.numel, generator=torch.Generator().manual_seed(rows.numel)).to(dtype)
    whole[indices(rows)] = data
    assert modulo(checksum(data, rows)) == defined(whole)
    unaligned = torch.cat([data[:1], data])[1:]
    assert modulo(checksum(unaligned, rows)) == defined(whole)
    parts, at = torch.zeros(2, dtype=torch.int64), 0
    for part in rows.chunks(max(1, rows.numel // 3)):
        parts += checksum(data[at : at + part.numel], part)
        at += part.numel
    assert modulo(parts) == defined(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [1, 2, 3, 1024, 2048, 5000])
def test_checksum_detects_swapped_and_shifted_words(distance, dtype):
    data = torch.randn(12_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = Rows(0, data.numel())
    moved = data.clone()
    moved[[7, 7 + distance]] = data[[7 + distance, 7]]
    assert modulo(checksum(moved, rows)) != modulo(checksum(data, rows))
    shifted = torch.cat([data[:100], data[100:9000].roll(distance), data[9000:]])
    assert modulo(checksum(shifted, rows)) != modulo(checksum(data, rows))


# ---------------------------------------------------------------------------------------------------------- many files


def of_three_files(folder: Path, **lies: str) -> Path:
    """Write tensors a, b and c to a file each, with an index; `lies` names other files in it."""
    for name in "abc":
        header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        data = torch.full((2,), float(ord(name))).numpy().tobytes()
        write_bytes(folder, file_of(header, data), f"model-{name}.safetensors")
    places = {name: f"model-{name}.safetensors" for name in "abc"} | lies
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_reader_of_an_index_opens_only_files_that_it_needs(tmp_path):
    with mock.patch.object(safetensors_reader, "read_header", wraps=safetensors_reader.read_header) as opened:
        reader = Reader.of_stem(of_three_files(tmp_path), "model")
        assert sorted(reader.names()) == ["a", "b", "c"] and "b" in reader and "d" not in reader
        assert not opened.called
        assert whole(reader, "b").tolist() == [ord("b")] * 2 and reader.shape("b") == (2,)
        assert [call.args[0].name for call in opened.call_args_list] == ["model-b.safetensors"]


def test_reader_without_index_opens_all_files(tmp_path):
    of_three_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert Reader.of_stem(tmp_path, "model").names() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ({"a": "model-b.safetensors"}, "model-b.safetensors does not contain tensor a"),
        ({"b": "model-c.safetensors"}, "model-c.safetensors does not contain tensor b"),
        ({"a": "model-d.safetensors"}, "model-d.safetensors cannot be read"),
        ({"a": ".."}, "cannot be read"),
    ],
)
def test_reader_refuses_an_index_that_lies(lies, said, tmp_path):
    reader = Reader.of_stem(of_three_files(tmp_path, **lies), "model")
    with pytest.raises(DamagedFile, match=said):
        [whole(reader, name) for name in ("a", "b")]


@pytest.mark.parametrize("file", ["../model-a.safetensors", "/model-a.safetensors", "."])
def test_index_that_leaves_its_folder_is_refused(file, tmp_path):
    of_three_files(tmp_path, a=file)
    with pytest.raises(DamagedFile, match="which is not in the folder"):
        Reader.of_stem(tmp_path, "model")


class _Call:
    """Stands for the C function `fallocate`, which fails."""

    def __init__(self, *numbers: int):
        self.numbers = list(numbers)

    def __call__(self, *args) -> int:
        ctypes.set_errno(self.numbers.pop(0))
        return -1


def test_file_system_without_allocation_gets_a_truncated_file(tmp_path):
    (plan,) = plan_files("model", {"a": ((1000,), torch.float32)}, 10**9)
    library = SimpleNamespace(fallocate=_Call(errno.EINTR, errno.EOPNOTSUPP))
    with mock.patch.object(ctypes, "CDLL", lambda *args, **options: library):
        create(tmp_path / plan.name, plan)
    path = tmp_path / plan.name
    assert path.stat().st_size == plan.size and path.stat().st_blocks * 512 < plan.size


def test_full_disk_is_an_error_before_anything_is_written(tmp_path):
    (plan,) = plan_files("model", {"a": ((1000,), torch.float32)}, 10**9)
    library = SimpleNamespace(fallocate=_Call(errno.ENOSPC))
    with mock.patch.object(ctypes, "CDLL", lambda *args, **options: library), pytest.raises(OSError) as error:
        create(tmp_path / plan.name, plan)
    assert error.value.errno == errno.ENOSPC
