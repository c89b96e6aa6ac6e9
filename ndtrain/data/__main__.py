"""Makes token files of a corpus, ahead of training, with all cores.

python -m ndtrain.data prepare out=<folder> data=text data.path=corpus/ data.tokenizer=bpe data.vocab_size=32000

  out                 the folder to make; then train with data=bin data.path=<folder>
  data                python, text, jsonl or hf (default: python)
  data.path           file, folder or glob (text, jsonl), hub name or local dataset (hf)
  data.tokenizer      byte, bpe (default: trained on a sample of the corpus), a tokenizer.json or a Hugging Face
                      folder; to blend corpora, prepare the second with the folder of the first
  data.vocab_size     of a bpe (default: {vocab_size})
  data.validation     fraction of documents held out (default: {validation})
  data.text_key       jsonl, hf: the field with the text (default: text)
  data.subset, data.split, data.eval_split
                      hf: configuration of the dataset, split to train on, split to validate on
  data.cache          where a trained bpe is kept
  workers             processes that tokenise (default: one for each core)
  unit                bytes of text that one takes at a time (default: {unit}, less of a small corpus)

Interrupted or killed, the same command goes on where it stopped. A changed corpus or tokenizer starts anew.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ndtrain.config import ConfigError, DataConfig, load_config
from ndtrain.config.checks import check_data
from ndtrain.config.near import near
from ndtrain.data.manifest import Manifest
from ndtrain.data.prepare import UNIT, Tally, prepare
from ndtrain.data.units import WorkerDied, start_forkserver

VOCAB_SIZE = 4096  # where data.vocab_size is not given: there is no model to take it from
LINE_S = 5.0  # between plain lines
_DATA = ("path", "tokenizer", "vocab_size", "validation", "text_key", "subset", "split", "eval_split", "cache")
KEYS = ("out", "workers", "unit", "data", *(f"data.{name}" for name in _DATA))
_KINDS = ("python", "text", "jsonl", "hf")


@dataclass(frozen=True)
class Options:
    out: Path
    workers: int
    unit: int | None
    data: DataConfig


def main(args: Sequence[str]) -> int:
    """Runs the command; the exit status: 2 for what cannot start as given, 1 for a failure on the way, 130 after
    Ctrl-C. One line says why."""
    if not args or {"-h", "--help"} & set(args):
        print((__doc__ or "").format(vocab_size=VOCAB_SIZE, validation=DataConfig.validation, unit=UNIT).strip())
        return 0 if args else 2
    try:
        if args[0] != "prepare":
            raise ConfigError(f"{args[0]}: no such command; {near(args[0], ['prepare'])}known: prepare")
        return run(parse(args[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(args: Sequence[str]) -> Options:
    """The options among `key=value` arguments.

    Raises:
        ConfigError: an argument that is none, an unknown key, an unusable value, `out` missing.
    """
    given, overrides = {}, [f"data.vocab_size={VOCAB_SIZE}"]
    for arg in args:
        key, equals, text = arg.partition("=")
        if not equals:
            raise ConfigError(f"{arg}: arguments are key=value; -h shows all keys")
        _check_key(key)
        if key.partition(".")[0] == "data":
            overrides.append(arg)
        else:
            given[key] = text
    if not given.get("out"):
        raise ConfigError("out is missing: name the folder to make, e.g. out=tokens/")
    cfg = load_config(overrides)
    if cfg.data.name not in _KINDS:
        hint = "; of a blend, prepare the corpora one at a time" if cfg.data.name == "blend" else ""
        raise ConfigError(f"data={cfg.data.name}: cannot be prepared, only {', '.join(_KINDS)}{hint}")
    check_data(cfg.data)
    return Options(
        out=Path(given["out"]).expanduser(),
        workers=_count("workers", given.get("workers", str(len(os.sched_getaffinity(0))))),
        unit=_count("unit", given["unit"]) if "unit" in given else None,
        data=cfg.data,
    )


def _check_key(key: str) -> None:
    if key in KEYS:
        return
    if key.removeprefix("data.") in DataConfig.__dataclass_fields__:
        raise ConfigError(f"{key}: plays no part in preparing, give it to the training; known: {', '.join(KEYS)}")
    raise ConfigError(f"{key}: no such key; {near(key, list(KEYS))}known: {', '.join(KEYS)}")


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be a whole number, at least 1")
    return int(text)


def run(options: Options) -> int:
    """Prepares as asked, showing how far it is; the exit status.

    Raises:
        ConfigError: it cannot start, or a document cannot be read.
    """
    display = Display()
    again = f"{options.out} keeps what is done, the same command goes on from there"
    try:
        with closing(display):
            manifest = prepare(
                options.data, options.out, options.workers, options.unit, note=display.note, show=display.show
            )
    except KeyboardInterrupt:
        print(f"stopped{display.place()}: {again}", file=sys.stderr)
        return 130
    except (OSError, WorkerDied) as error:
        print(f"error: {_reason(error)}: {again}", file=sys.stderr)
        return 1
    display.note(summary(manifest, display.tally))
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def summary(manifest: Manifest, tally: Tally | None) -> str:
    """What a prepared folder holds and, where work was done, how fast it went."""
    tokens, documents = manifest.tokens, manifest.documents
    words = [f"{manifest.folder}: {tokens['train']:,} training tokens of {documents['train']:,} documents"]
    if tokens["validation"]:
        words.append(f"{tokens['validation']:,} validation tokens of {documents['validation']:,} documents")
    words.append(f"{manifest.dtype}, vocabulary {manifest.vocab_size:,}")
    if tally is not None:
        words.append(f"{tally.seconds:.1f} s, {tally.tokens_per_s:,.0f} tokens/s")
    return "; ".join(words)


class Display:
    """How far a preparation is: a bar on a terminal, plain lines anywhere else."""

    def __init__(self, console: Console | None = None):
        self.tally: Tally | None = None
        self._console = console or Console()
        self._bar: Progress | None = None
        self._printed = 0.0

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, tally: Tally) -> None:
        """Shows the tally; as a plain line only every `LINE_S`."""
        if self.tally is None:
            self._printed = time.monotonic()
        self.tally = tally
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._draw(tally)
        elif time.monotonic() - self._printed >= LINE_S:
            self._printed = time.monotonic()
            self.note(f"{_amount(tally)}  {_figures(tally)}")

    def place(self) -> str:
        """Where it stopped, for a message; nothing if it has not begun."""
        return f" at {_amount(self.tally)}" if self.tally else ""

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _draw(self, tally: Tally) -> None:
        if self._bar is None:
            columns = [
                TextColumn("{task.fields[amount]}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
            ]
            self._bar = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
            self._task = self._bar.add_task("", total=tally.size, amount="", figures="")
            self._bar.start()
            self._console.show_cursor(True)  # rich hides it, and a killed process could not bring it back
        self._bar.update(self._task, completed=tally.done, amount=_amount(tally), figures=_figures(tally), refresh=True)


def _amount(tally: Tally) -> str:
    return f"{tally.done / 1e6:,.1f} of {tally.size / 1e6:,.1f} MB"


def _figures(tally: Tally) -> str:
    left = "" if tally.left is None else f"  left {timedelta(seconds=round(tally.left))}"
    return f"{tally.tokens:,} tokens  {tally.tokens_per_s:,.0f} tokens/s{left}"


if __name__ == "__main__":
    start_forkserver()  # it is ready by the time a tokenizer is trained
    sys.exit(main(sys.argv[1:]))
