"""Writes files of tokens byte by byte, from the descriptions of their formats."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"<u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}  # Megatron's codes of the types of ids
LLMC = {"<u2": (20240520, 1), "<u4": (20240801, 7)}

Documents = Sequence[np.ndarray]


def random_documents(count: int, vocab: int = 200, eos: int | None = 0, seed: int = 0) -> list[np.ndarray]:
    """Documents of 0 to 40 ids in [1, vocab), each followed by `eos`."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, vocab, rng.integers(0, 41)) for _ in range(count)]
    return texts if eos is None else [np.append(text, eos) for text in texts]


def write_megatron(prefix: Path, documents: Documents, dtype: str = "<u2", parts: int = 1) -> Path:
    """Writes PREFIX.bin and PREFIX.idx; each document is `parts` sequences. Returns the prefix."""
    sequences = [part for document in documents for part in np.array_split(document, parts)]
    lengths = [len(sequence) for sequence in sequences]
    item = int(dtype[2:])
    with open(f"{prefix}.bin", "wb") as file:
        file.write(b"".join(sequence.astype(dtype).tobytes() for sequence in sequences))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]))
        file.write(struct.pack("<QQ", len(sequences), len(documents) + 1))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        file.write(struct.pack(f"<{len(lengths)}q", *(item * sum(lengths[:n]) for n in range(len(lengths)))))
        file.write(struct.pack(f"<{len(documents) + 1}q", *(parts * n for n in range(len(documents) + 1))))
    return prefix


def write_llmc(path: Path, tokens: np.ndarray, dtype: str = "<u2") -> Path:
    magic, version = LLMC[dtype]
    path.write_bytes(struct.pack("<3i", magic, version, len(tokens)) + bytes(253 * 4) + tokens.astype(dtype).tobytes())
    return path


def write_datatrove(
    path: Path, documents: Documents, dtype: str = "<u2", index: bool = True, metadata: bool = True
) -> Path:
    tokens = np.concatenate(documents)
    path.write_bytes(tokens.astype(dtype).tobytes())
    if index:
        ends = np.cumsum([len(document) for document in documents])
        path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        text = f"gpt2|{dtype[2:]}\n{len(tokens)}\n{len(tokens)} T"
        path.with_name(path.name + ".metadata").write_text(text)
    return path


def write(name: str, path: Path, documents: Documents, dtype: str = "<u2") -> str:
    """Writes documents in a format. Returns what `data.path` is to be."""
    if name == "megatron":
        return str(write_megatron(path, documents, dtype.replace("u4", "i4")))
    if name == "llmc":
        return str(write_llmc(path.with_suffix(".bin"), np.concatenate(documents), dtype))
    return str(write_datatrove(path.with_suffix(".ds"), documents, dtype))
