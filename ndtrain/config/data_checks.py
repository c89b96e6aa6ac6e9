"""Checks of the keys of `data` that read no files."""

from collections.abc import Sequence
from datetime import date

from ndtrain.config.schema import TOKEN_SOURCES, DataConfig, require


def check_data(data: DataConfig) -> None:
    """Check the keys of `data`, or of one corpus of a blend, without reading any file.

    Raises:
        ConfigError: a key has an invalid value; the message names the key.
    """
    name = data.name
    if name in TOKEN_SOURCES and name != "bin":
        _check_token_files(data)
    if name == "chat":
        _check_chat(data)
    if name in ("text", "jsonl", "chat", "bin", "hf"):
        require(bool(data.path), f"data.path is missing: data={name} needs it, e.g. data.path=corpus/")
    require(
        name not in ("python", "text", "jsonl", "chat", "hf", "bin") or data.paths is None,
        f"data.paths={data.paths}: data={name} reads data.path, only {_listed(TOKEN_SOURCES[1:])} read data.paths: "
        "set it to null",
    )
    require(0 <= data.validation < 1, f"data.validation={data.validation}: must be in [0, 1)")
    require(name != "blend" or bool(data.blend), f"data.blend is empty: data=blend needs {_BLEND}")
    require(name == "blend" or not data.blend, f"data.blend is for data=blend, but data={name}: set data=blend")
    require(
        name == "hf" or not data.streaming,
        f"data.streaming=true: data={name} does not support streaming, only data=hf does: set it to false",
    )
    require(
        name in TOKEN_SOURCES or data.validation_path is None,
        f"data.validation_path={data.validation_path}: data={name} does not read it, only {_listed(TOKEN_SOURCES)} do: "
        "set it to null, and use data.validation",
    )
    require(
        name in ("hf", "blend") or data.eval_split is None,
        f"data.eval_split={data.eval_split}: data={name} has no splits, only data=hf has: set it to null, and use "
        "data.validation",
    )


def _listed(sources: Sequence[str]) -> str:
    return ", ".join(f"data={name}" for name in sources)


def _check_chat(data: DataConfig) -> None:
    require(
        data.tokenizer not in ("byte", "bpe"),
        f"data.tokenizer={data.tokenizer}: data=chat needs the model's tokenizer with its chat template: name the "
        "model's folder, as in init_from",
    )
    require(
        data.pack,
        "data.pack=false: data=chat always packs whole conversations: set it to true",
    )
    require(data.eos_id is None, f"data.eos_id={data.eos_id}: data=chat reads it from data.tokenizer: set it to null")
    try:
        date.fromisoformat(data.date)
    except ValueError:
        require(False, f"data.date={data.date}: must be a date, e.g. {DataConfig.date}")


def _check_token_files(data: DataConfig) -> None:
    """Check the keys for token files in the format of another program."""
    name = data.name
    require(
        bool(data.path or data.paths),
        f"data.path is missing: data={name} needs it, e.g. data.path={_EXAMPLES[name]}, or data.paths=[...]",
    )
    require(
        not (data.path and data.paths),
        f"data.path={data.path} and data.paths={data.paths}: data={name} reads only one of them: set the other to null",
    )
    require(
        name == "datatrove" or data.dtype == DataConfig.dtype,
        f"data.dtype={data.dtype}: data={name} reads the dtype from its files: remove data.dtype",
    )


_EXAMPLES = {"megatron": "corpus_text_document", "llmc": "'fineweb_train_*.bin'", "datatrove": "tokens/"}
_BLEND = "corpora with weights, e.g. data.blend=[{name: python, weight: 1}, {name: text, path: corpus/, weight: 2}]"
