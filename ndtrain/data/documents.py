"""A corpus as named documents: which of them the validation split holds, and the chunks of text that are tokenised."""

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise

from ndtrain.config import ConfigError

CHUNK_CHARACTERS = 1 << 20  # of a document that are held in memory and tokenised at a time
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: unique in the corpus.
        chunks: the text in order, in strings of at most CHUNK_CHARACTERS characters.
        held_out: whether the validation split holds it; None: its name decides.
        extra_bytes: bytes of the corpus that belong to it beside its text, as the JSON of a line does.
    """

    name: str
    chunks: Iterator[str]
    held_out: bool | None = None
    extra_bytes: int = 0


@dataclass(frozen=True)
class TextChunk:
    """A chunk of a document's text, as the tokenizer sees it.

    Attributes:
        held_out: whether the validation split holds its document.
        last: whether it ends its document.
        extra_bytes: those of the document on its last chunk, else 0.
    """

    text: str
    held_out: bool
    last: bool
    extra_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of the corpus that it stands for."""
        return len(self.text.encode(errors="surrogatepass")) + self.extra_bytes


class Corpus(ABC):
    """Documents in a fixed order.

    Attributes:
        setting: the key and value that begin an error message.
        validation: the fraction of documents held out for validation.
    """

    setting: str
    validation: float

    @abstractmethod
    def key(self) -> str:
        """Returns a digest that changes with the settings and the content. It is cheap: every start computes it."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yields every document in order."""

    @abstractmethod
    def size(self) -> int:
        """Returns about how many bytes of text there are."""

    @abstractmethod
    def partition(self, size: int) -> Iterator[tuple["Corpus", int]]:
        """Yields (part, its bytes): consecutive parts of the corpus, each of about `size` bytes.

        The chunks of all parts, one after the other, are those of the whole corpus. A part can be pickled.
        """

    @abstractmethod
    def describe(self) -> str:
        """Says in words what is about to be read."""

    def chunks(self) -> Iterator[TextChunk]:
        """Yields every document's chunks in order. An empty document has none."""
        for document in self.documents():
            held_out = document.held_out
            if held_out is None:
                held_out = is_held_out(document.name, self.validation)
            yield from document_chunks(document.chunks, held_out, document.extra_bytes)

    def sample(self, limit: int, on_read: Callable[[TextChunk], None] = lambda chunk: None) -> Iterator[str]:
        """Yields about `limit` bytes of the training split (all of it, if smaller), drawn evenly and always the same.

        Args:
            on_read: called with each chunk of the corpus, drawn or not.
        """
        share = limit / max(self.size() * (1 - self.validation), 1)
        for number, chunk in enumerate(self.chunks()):
            on_read(chunk)
            if not chunk.held_out and _hash_fraction("sample", number) < share:
                yield chunk.text


@dataclass(frozen=True)
class IterableCorpus(Corpus):
    """A corpus that a function yields: what a plugin's data source returns.

    Attributes:
        texts: yields (name, text) of every document, each time in the same order; names are unique.
        version: changes with the content; tokens of another version are not taken from the cache.
        bytes: about how many there are, for progress and for the sample that a bpe is trained on.
    """

    setting: str
    validation: float
    texts: Callable[[], Iterator[tuple[str, str]]]
    version: str
    bytes: int

    def key(self) -> str:
        return blake2b(f"{self.setting}\0{self.validation}\0{self.version}".encode(), digest_size=16).hexdigest()

    def documents(self) -> Iterator[Document]:
        for name, text in self.texts():
            yield Document(name, text_chunks(io.StringIO(text).read))

    def size(self) -> int:
        return self.bytes

    def partition(self, size: int) -> Iterator[tuple[Corpus, int]]:
        """One part: a function cannot be asked for documents in the middle."""
        yield self, self.bytes

    def describe(self) -> str:
        return self.setting


def document_chunks(texts: Iterator[str], held_out: bool = False, extra_bytes: int = 0) -> Iterator[TextChunk]:
    """Yields the chunks of one document, the last of them marked."""
    for text, following in pairwise(chain(texts, (None,))):
        last = following is None
        yield TextChunk(text, held_out, last, extra_bytes if last else 0)


def require_training_text(setting: str, train: int, validation: int) -> None:
    """Checks how many tokens the two splits of a corpus hold.

    Raises:
        ConfigError: the training split holds none. The message begins with `setting`.
    """
    if train == 0:
        cause = "every document is in the validation split" if validation else "no document has any text"
        raise ConfigError(f"{setting}: nothing to train on, {cause}: give more data or set data.validation=0")


def is_held_out(name: str, fraction: float) -> bool:
    """Returns True if the document `name` is in the validation split, which holds that fraction of the documents."""
    return _hash_fraction("split", name) < fraction


def _hash_fraction(purpose: str, name: str | int) -> float:
    """Returns a number in [0, 1) that depends on the arguments alone. So a new document moves no other one."""
    hashed = blake2b(os.fsencode(f"{purpose}:{name}"), digest_size=8).digest()
    return int.from_bytes(hashed, "little") / 2**64


_WORD_AT_LINE_END = re.compile(r"[^\W_](?=\r?\n)")


def text_chunks(read: Callable[[int], str]) -> Iterator[str]:
    """Yields the text behind `read(characters)` in chunks of at most CHUNK_CHARACTERS characters.

    A long text is split between a word and a line end. Byte-level tokenizers split there anyway, so the tokens stay
    the same.
    """
    buffer = ""
    while text := read(CHUNK_CHARACTERS - len(buffer)):
        buffer += text
        if len(buffer) == CHUNK_CHARACTERS:
            word_ends = (match.end() for match in _WORD_AT_LINE_END.finditer(buffer, CHUNK_CHARACTERS // 2))
            *_, end = chain((CHUNK_CHARACTERS,), word_ends)
            yield buffer[:end]
            buffer = buffer[end:]
    if buffer:
        yield buffer
