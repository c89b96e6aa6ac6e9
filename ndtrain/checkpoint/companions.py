"""The companions of the weights in a Hugging Face folder, which ndtrain copies without interpreting them.

They are tokenizer files, generation_config.json, licences, and some fields of config.json. A run that starts from a
folder copies them into its checkpoints. A run that resumes a checkpoint does too. They are read into memory once, at
the start, because the folder may be gone when a checkpoint is written.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ndtrain.checkpoint.elements import CheckpointError, sha256
from ndtrain.config import ModelConfig
from ndtrain.data.chat.template import TEMPLATES
from ndtrain.data.hf_code import without_code
from ndtrain.data.tokenizer import is_tokenizer_file
from ndtrain.model.families.hf_config import read_hf_config
from ndtrain.model.families.hf_fields import uninterpreted_fields

_FILE_BYTES = 64 << 20  # limit for a file that is copied
_TOTAL_BYTES = 256 << 20  # limit for all copied files together
_FILES = 256
_FOLDERS = (TEMPLATES,)  # folders whose files are copied too
_NOT_COPIED = (
    ".*", "config.json", "state.json", "*.index.json",
    # weights and training state
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp", "*.pkl", "*.pickle", "*.npy", "*.npz", "*.h5",
    "*.msgpack", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.tflite", "*.nemo", "*.tar", "*.gz", "*.zip",
    # code
    "*.py", "*.pyc", "*.ipynb", "*.so", "*.sh",
    # the README of the source's model, and its pictures
    "readme*", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf",
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class")
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Companions:
    """Files and fields of a Hugging Face folder that are copied into checkpoints unchanged.

    Attributes:
        files: name, relative to the folder -> content.
        fields: the fields of config.json that ndtrain does not interpret.
        notes: messages for the user about files that are too large to be copied.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the files into `folder`, and add the fields to the config.json there."""
        self.write_files(folder)
        path = folder / "config.json"
        written = json.loads(path.read_text())
        path.write_text(json.dumps(_merged(self.fields, written), indent=1) + "\n")

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def names_end_token(self) -> bool:
        """Return True if they name the tokens that end a text."""
        return _GENERATION in self.files or self.fields.get("eos_token_id") is not None

    def end_tokens(self) -> set[int]:
        """Return the tokens that end a text, or an empty set if they name none."""
        try:
            ids = json.loads(self.files.get(_GENERATION, b"{}"))["eos_token_id"]
        except (ValueError, RecursionError, KeyError, TypeError):
            ids = self.fields.get("eos_token_id")
        return {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}

    def without_tokenizer(self) -> "Companions":
        """Return the companions that do not depend on the tokenizer."""
        kept = {name: c for name, c in self.files.items() if not is_tokenizer_file(name) and name != _GENERATION}
        return replace(self, files=kept, fields={k: v for k, v in self.fields.items() if k not in _TOKEN_IDS})


def read_companions(folder: Path, m: ModelConfig | None = None, written: Mapping[str, str] | None = None) -> Companions:
    """Read the companions of the weights in `folder`.

    Args:
        m: the model of the run. If its type differs from the type of the folder's model (`moe.upcycle`), only the
            fields about tokens and generation are returned. None: no field is returned.
        written: name -> SHA-256 of the files of a checkpoint, as its state.json lists them.

    Raises:
        CheckpointError: a file cannot be read, or its SHA-256 is wrong.
    """
    files: dict[str, bytes] = {}
    notes: list[str] = []
    try:
        for path in _candidates(folder):
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            if why := _excess(size, files):
                notes.append(f"{path} ({size:,} bytes) is not copied into the checkpoints: {why}")
                continue
            content = path.read_bytes()
            if written and name in written and sha256(content) != written[name]:
                raise CheckpointError(f"{path} does not match its checksum")
            files[name] = without_code(content) if path.suffix == ".json" else content
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    fields = uninterpreted_fields(read_hf_config(folder), m.model_type) if m else {}
    return Companions(files, fields, tuple(notes))


def _candidates(folder: Path) -> Iterator[Path]:
    for below in (folder, *(folder / name for name in _FOLDERS)):
        for path in sorted(below.iterdir()) if below.is_dir() else ():
            if not any(fnmatch(path.name.lower(), pattern) for pattern in _NOT_COPIED) and path.is_file():
                yield path


def _excess(size: int, files: dict[str, bytes]) -> str:
    """Return why one more file of `size` bytes is too much, or an empty string if it is not."""
    if size > _FILE_BYTES:
        return f"it is larger than {_FILE_BYTES >> 20} MiB"
    if size + sum(map(len, files.values())) > _TOTAL_BYTES:
        return f"with it, all files together are larger than {_TOTAL_BYTES >> 20} MiB"
    return f"there are more than {_FILES} files" if len(files) >= _FILES else ""


def _merged(fields: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Merge both into one config.json. ndtrain's own fields win, except `use_cache`, for which it has only a
    default."""
    kept = {key: fields[key] for key in ("use_cache",) if key in fields}
    return fields | written | kept
