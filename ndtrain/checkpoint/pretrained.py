"""Reads weights from a Hugging Face folder: one safetensors file, or several with an index. A checkpoint is one too.

The tensors are named as in the whole language model, or as in a saved base model, without the leading `model.`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ndtrain.checkpoint.directory import list_checkpoints, read_state
from ndtrain.checkpoint.elements import CheckpointError, model_part, read_into, together
from ndtrain.checkpoint.pieces import host_file, index_file, is_in_pieces, open_tensors
from ndtrain.checkpoint.safetensors_io import DamagedFile
from ndtrain.checkpoint.safetensors_reader import Reader, reading, weight_map
from ndtrain.config import ModelConfig
from ndtrain.config.store import folder_at
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.row_map import Rows
from ndtrain.model import tensor_shapes
from ndtrain.model.block import dim_sizes
from ndtrain.model.families.hf_config import from_hf, read_hf_config
from ndtrain.model.families.hf_fields import unknown_fields
from ndtrain.model.transformer import bias_names, sparse_layers
from ndtrain.parallel.build import Stages

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MODEL, _EMBED, _HEAD = "model.", "embed_tokens.weight", "lm_head.weight"
_LEFTOVERS = re.compile(r".*\brotary_emb\.inv_freq")  # buffers that older versions of transformers saved


_MOST_ELEMENTS = 2**59  # of a tensor: its bytes then fit into 64 bits
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def model_folder(init_from: str) -> Path:
    """Return the model folder that `init_from` names: that folder itself, or the newest checkpoint of a run folder.

    Raises:
        CheckpointError: there is no such folder, or the run has no checkpoint yet. Or its newest checkpoint is damaged,
            or is of another step than its name. If the name may be a model on the Hugging Face hub, the message
            explains how to download it.
    """
    folder = folder_at(init_from)
    if (folder / "config.json").is_file():
        return folder
    if checkpoints := list_checkpoints(folder / "checkpoints") or list_checkpoints(folder):
        if (checkpoints[0] / "state.json").is_file():
            read_state(checkpoints[0])
        return checkpoints[0]
    if (folder / "checkpoints").is_dir():
        raise CheckpointError(
            f"init_from={init_from}: this run has no checkpoint yet: set checkpoint.every in it, or name another run"
        )
    if not folder.exists() and _HUB_NAME.fullmatch(init_from):
        target = f"models/{init_from.rpartition('/')[2]}"
        raise CheckpointError(
            f"init_from={init_from}: there is no such folder. If it is a model on the Hugging Face hub, download it "
            f"with `hf download {init_from} --local-dir {target}` and set init_from={target}"
        )
    return folder


def read_model(folder: Path) -> ModelConfig:
    """Return the model that a folder's config.json describes.

    The numbers of layers and experts are first compared with the number of tensors in the folder's files. Only then may
    code loop over them.

    Raises:
        CheckpointError: the folder has too few tensors for such a model, or no weights.
        ConfigError: as `read_hf_config` and `from_hf`.
    """
    m = from_hf(read_hf_config(folder), name=folder.name)
    with naming(folder):
        held = _number_of_tensors(folder)
        if m.num_hidden_layers > held:
            raise DamagedFile(_too_few(f"num_hidden_layers={m.num_hidden_layers}", held))
        if len(m.mlp_only_layers) > m.num_hidden_layers:
            raise DamagedFile("mlp_only_layers in config.json names more layers than the model has")
        if m.num_experts and m.num_experts * len(sparse_layers(m)) > held:
            raise DamagedFile(_too_few(f"the experts of {len(sparse_layers(m))} layers, {m.num_experts} each,", held))
        sizes = sorted(units * width for units, width in dim_sizes(m).values())
        if math.prod(sizes[-2:]) > _MOST_ELEMENTS:
            raise DamagedFile(f"config.json has the sizes {sizes[-1]} and {sizes[-2]}, too large for a tensor")
    return m


def _too_few(what: str, held: int) -> str:
    return f"{what} in config.json do not fit the model files, which contain {held} tensors"


def _number_of_tensors(folder: Path) -> int:
    """Count the tensors in the index, or in the header if there is one file. Other headers are not read."""
    if is_in_pieces(folder, "model"):
        return len(open_tensors(folder, "model").names())
    files = weight_files(folder)
    return len(Reader(files).names() if files[0].name == _ONE else _weight_map(folder))


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Make errors name `init_from` within the context.

    Raises:
        CheckpointError: instead of DamagedFile.
    """
    try:
        yield
    except DamagedFile as error:
        raise CheckpointError(f"init_from={folder}: {error}".replace(f" {folder}/", " ")) from error


def check_folder(folder: Path, m: ModelConfig) -> list[str]:
    """Check the weights of a Hugging Face folder against the model of its config.json, using only the files' headers.
    Meant for one rank, before any process group exists.

    Args:
        m: the result of `read_model`.

    Returns:
        Messages for the user.

    Raises:
        CheckpointError: the weights are pickled, a file of the index is missing, or a header is damaged. Or a tensor is
            missing, has no place in the model, or has another shape. The message is one line that names it.
    """
    with naming(folder):
        files = [] if is_in_pieces(folder, "model") else weight_files(folder)
        if files and files[0].name != _ONE:
            _check_index(folder, Reader(files))
        _check_tensors(open_weights(folder), m)
    strange = unknown_fields(read_hf_config(folder))
    return [f"init_from={folder}: ignored fields of config.json: {', '.join(strange)}"] if strange else []


def load_weights(folder: Path, stages: Stages, mesh: Mesh, origins: Mapping[str, str | None] | None = None) -> None:
    """Read this rank's elements of the weights from a Hugging Face folder, and convert them to master precision. The
    experts' selection biases are read too, and are zeros if the folder has none.

    Args:
        origins: name of a model's tensor -> the folder's tensor to copy it from, if the names differ. None: the tensor
            is left unchanged.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or has elements that are not finite. Or a file is
            damaged or cannot be read.
    """

    def read() -> None:
        reader, renamed = open_weights(folder), origins or {}
        reader.name_also({name: origin for name, origin in renamed.items() if origin is not None})
        left = {name for name, origin in renamed.items() if origin is None}
        read_into(stages, reader, [model_part(stages.units.plan)], left=left, finite=True)
        stages.balance.bias_LX.copy_(selection_biases(folder, stages.model))

    try:
        together(mesh, read)
    except CheckpointError as error:
        raise CheckpointError(f"init_from={folder}: {error}") from error
    stages.units.weights_changed()
    stages.units.start_average()
    stages.units.start_outer()


def selection_biases(folder: Path, m: ModelConfig) -> Tensor:
    """Return the selection biases of all layers with experts, fp32 [layers, experts]: zeros if the folder has none.

    Raises:
        DamagedFile: as `Reader`, or a bias is not a finite number.
    """
    readers = {
        "model": open_weights(folder),
        "optimizer": open_tensors(folder, "optimizer"),
    }
    names = bias_names(m)
    biases_LX = torch.zeros(len(names), m.num_experts or 0)
    for bias_X, (name, stem) in zip(biases_LX, names.items(), strict=True):
        if name in readers[stem]:
            if readers[stem].shape(name) != bias_X.shape:
                raise DamagedFile(f"tensor {name} has shape {readers[stem].shape(name)}, not {tuple(bias_X.shape)}")
            bias_X.copy_(readers[stem].read(name, Rows(0, len(bias_X))))
            if not bias_X.isfinite().all():  # a router would always choose this expert, or never
                raise DamagedFile(f"tensor {name} has elements that are not finite numbers")
    return biases_LX


def open_weights(folder: Path) -> Reader:
    """Open the weights of a folder for reading, under the names of the whole language model.

    Raises:
        DamagedFile: as `Reader` and `weight_files`.
    """
    if is_in_pieces(folder, "model"):
        return open_tensors(folder, "model")
    files = weight_files(folder)
    reader = Reader(files)
    if _EMBED in reader and _MODEL + _EMBED not in reader:
        return Reader(files, lambda name: name if name == _HEAD else _MODEL + name)
    return reader


# --------------------------------------------------------------------------------------------------------------- files


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder, in `transformers`' order of preference.

    Raises:
        DamagedFile: there are none (the message names what there is instead), or the index does not parse or names a
            missing file.
    """
    if (folder / _ONE).is_file():
        names = [_ONE]
    elif (folder / _INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
    else:
        raise DamagedFile(_without_weights(folder))
    for name in names:
        if not (folder / name).is_file():
            raise DamagedFile(f"{name}, which {_INDEX} names, is missing: download the folder again")
        with reading(folder / name), (folder / name).open("rb") as f:
            if f.read(12) == b"version http":
                raise DamagedFile(f"{name} is a Git LFS pointer, not the weights: fetch them with git lfs pull")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor, from the index."""
    try:
        return weight_map(folder / _INDEX)
    except DamagedFile as error:
        raise DamagedFile(f"{error}: download the folder again") from error


def _check_index(folder: Path, reader: Reader) -> None:
    for name, file in _weight_map(folder).items():
        if name not in reader:
            raise DamagedFile(f"{_INDEX} names tensor {name} in {file}, which does not contain it")


def _without_weights(folder: Path) -> str:
    pickled = sorted(p.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        return (
            f"holds only pickled weights ({pickled[0]}), which are never loaded: convert them to safetensors "
            "with from_pretrained and save_pretrained of transformers"
        )
    if (folder / host_file("model", 0)).exists():
        return f"holds files of hosts, but {index_file('model')}, which finds the tensors in them, is missing"
    return f"holds neither {_ONE} nor {_INDEX}: name a folder with a model's weights"


def _check_tensors(reader: Reader, m: ModelConfig) -> None:
    """Check that the files hold the model's tensors and nothing else.

    Raises:
        DamagedFile: a tensor is missing, has another shape, has a dtype that no weight has, or has no place in the
            model. The message names the first one.
    """
    wanted = tensor_shapes(m) | {n: (m.num_experts,) for n, stem in bias_names(m).items() if stem == "model"}
    for name, shape in wanted.items():
        if name not in reader:
            tied = " (config.json has tie_word_embeddings=false)" if name == _HEAD else ""
            raise DamagedFile(f"tensor {name} is missing from the model files{tied}")
        if reader.shape(name) != shape:
            raise DamagedFile(f"tensor {name} has shape {reader.shape(name)}, but {shape} according to config.json")
        reader.dtype(name)  # refuses a dtype that no weight has
    for name in reader.names():
        # transformers does not read the head of a tied model either
        if name not in wanted and name != _HEAD and not _LEFTOVERS.fullmatch(name):
            raise DamagedFile(f"tensor {name} is not part of the model in config.json ({m.model_type})")
