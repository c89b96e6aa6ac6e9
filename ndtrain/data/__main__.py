"""Tokenises a corpus into token files before training, on all cores.

python -m ndtrain.data prepare out=<folder> data=text data.path=corpus/ data.tokenizer=bpe data.vocab_size=32000

  out                 the folder to make; then train with data=bin data.path=<folder>
  data                python, text, jsonl, hf, or a plugin's source with its own keys (default: python)
  plugins             modules that add sources, e.g. plugins=[my_package.notes]
  data.path           file, folder or glob (text, jsonl), hub name or local dataset (hf)
  data.tokenizer      byte, bpe (default: trained on a sample of the corpus), a tokenizer.json or a Hugging Face
                      folder; to blend corpora, prepare the second with the folder of the first
  data.vocab_size     vocabulary size of a bpe (default: {vocab_size})
  data.validation     fraction of documents held out (default: {validation})
  data.text_key       jsonl, hf: the field with the text (default: text)
  data.subset, data.split, data.eval_split
                      hf: configuration of the dataset, split to train on, split to validate on
  data.cache          folder that keeps a trained bpe
  workers             processes that tokenise (default: one per core)
  shard               bytes of text in a shard of the tokens (default: a 64th of the corpus, 256 KiB to 256 MiB; more
                      for a corpus of more than 256 GiB)

Several hosts can share the work: run the same command on each, with a folder that all of them see. After an interrupt
or a kill, the same command goes on after the last finished shard. It starts over if the corpus has changed. It refuses
a folder that was made with another tokenizer.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ndtrain.arguments import near, status_of
from ndtrain.config import ConfigError, DataConfig, check_overrides, load_config, registry
from ndtrain.config.data_checks import check_data
from ndtrain.config.store import is_address
from ndtrain.data.manifest import Manifest
from ndtrain.data.prepare import prepare
from ndtrain.data.progress import ProgressDisplay, TextProgress
from ndtrain.data.workers import WorkerDied, start_forkserver
from ndtrain.device.cores import cpu_cores

VOCAB_SIZE = 4096  # if data.vocab_size is not given, since there is no model to take it from
_DATA = ("path", "tokenizer", "vocab_size", "validation", "text_key", "subset", "split", "eval_split", "cache")
KEYS = ("out", "workers", "shard", "plugins", "data", *(f"data.{name}" for name in _DATA))
_KINDS = ("python", "text", "jsonl", "hf")


@dataclass(frozen=True)
class Options:
    """The arguments of the command. `shard` is the bytes of text in a shard (None: by the size of the corpus)."""

    out: Path
    workers: int
    shard: int | None
    data: DataConfig


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit status. Print the reason of a failure in one line.

    The status is 2 if an argument or the corpus is unusable, 1 if the disk or a worker fails, and 130 after Ctrl-C.
    """
    if not args or {"-h", "--help"} & set(args):
        print((__doc__ or "").format(vocab_size=VOCAB_SIZE, validation=DataConfig.validation).strip())
        return 0 if args else 2
    try:
        if args[0] != "prepare":
            raise ConfigError(f"{args[0]}: no such command; {near(args[0], ['prepare'])}known: prepare")
        return run(parse(args[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(args: Sequence[str]) -> Options:
    """Read `key=value` arguments. The `data.*` keys are overrides in Hydra's grammar.

    Raises:
        ConfigError: an argument has no `=`, a key is unknown, a value is unusable, `out` is missing, or a plugin cannot
            be loaded.
    """
    check_overrides([arg for arg in args if arg.startswith("plugins=")])  # loads the plugins, whose sources add keys
    keys = _keys(args)
    given, overrides = {}, [f"data.vocab_size={VOCAB_SIZE}"]
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals:
            raise ConfigError(f"{arg}: arguments are key=value; -h shows all keys")
        _check_key(key, keys)
        if key.partition(".")[0] in ("data", "plugins"):
            overrides.append(arg)
        else:
            given[key] = text
    if not given.get("out"):
        raise ConfigError("out is missing: give the folder to create, e.g. out=tokens/")
    if is_address(given["out"]):
        raise ConfigError(f"out={given['out']}: is not a folder of a file system: give one, and upload it")
    cfg = load_config(overrides)
    kinds = (*_KINDS, *registry.names("source"))
    if cfg.data.name not in kinds:
        hint = "; prepare the corpora of a blend one at a time" if cfg.data.name == "blend" else ""
        raise ConfigError(f"data={cfg.data.name}: cannot be prepared; supported: {', '.join(kinds)}{hint}")
    check_data(cfg.data)
    return Options(
        out=Path(given["out"]).expanduser(),
        workers=_count("workers", given.get("workers", str(cpu_cores()))),
        shard=_count("shard", given["shard"]) if "shard" in given else None,
        data=cfg.data,
    )


def _keys(args: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that the command accepts: `KEYS`, and the own keys of a plugin's source if `data=` names one."""
    source = next((arg.partition("=")[2] for arg in args if arg.startswith("data=")), "")
    own = registry.own_keys("source", source) if source in registry.names("source") else []
    return (*KEYS, *(f"data.{name}" for name in own))


def _check_key(key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    if key.removeprefix("data.") in DataConfig.__dataclass_fields__:
        raise ConfigError(f"{key}: not used by prepare: give it to the training run; known: {', '.join(known)}")
    raise ConfigError(f"{key}: no such key; {near(key, list(known))}known: {', '.join(known)}")


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be a whole number, at least 1")
    return int(text)


def run(options: Options) -> int:
    """Prepare the corpus, show the progress, and return the exit status.

    Raises:
        ConfigError: the preparation cannot start, or a document cannot be read.
    """
    display = ProgressDisplay()
    again = f"{options.out} keeps the finished shards, run the same command again to go on"
    try:
        with closing(display):
            manifest = prepare(
                options.data, options.out, options.workers, options.shard, note=display.note, on_progress=display.show
            )
    except KeyboardInterrupt:
        print(f"stopped{display.location()}: {again}", file=sys.stderr)
        return 130
    except (OSError, WorkerDied) as error:
        print(f"error: {_reason(error)}: {again}", file=sys.stderr)
        return 1
    display.note(summary(manifest, display.progress))
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def summary(manifest: Manifest, progress: TextProgress | None) -> str:
    """Describe a prepared folder in one line. If work was done, include its speed."""
    tokens, documents = manifest.tokens, manifest.documents
    words = [f"{manifest.folder}: {tokens['train']:,} training tokens of {documents['train']:,} documents"]
    if tokens["validation"]:
        words.append(f"{tokens['validation']:,} validation tokens of {documents['validation']:,} documents")
    words.append(f"{manifest.dtype}, vocabulary {manifest.vocab_size:,}")
    if progress is not None:
        words.append(f"{progress.seconds:.1f} s, {progress.tokens_per_s:,.0f} tokens/s")
    return "; ".join(words)


if __name__ == "__main__":
    start_forkserver()  # it is ready by the time a tokenizer is trained
    sys.exit(status_of(main))
