"""A corpus as named documents: their assignment to the validation split, and the chunks of text that are tokenised."""

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise

from ndtrain.config import ConfigError

CHUNK_CHARACTERS = 1 << 20  # of a document, held in memory and tokenised at a time
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: unique in the corpus.
        chunks: the text in order, in strings of at most CHUNK_CHARACTERS characters.
        held_out: True if the document is in the validation split; None: its name decides.
        extra_bytes: bytes of the corpus that belong to the document besides its text, such as the JSON around it.
    """

    name: str
    chunks: Iterator[str]
    held_out: bool | None = None
    extra_bytes: int = 0


@dataclass(frozen=True)
class TextChunk:
    """A chunk of a document's text, as the tokenizer sees it.

    Attributes:
        held_out: True if its document is in the validation split.
        last: True if it is the last chunk of its document.
        extra_bytes: the document's extra bytes if this is its last chunk, else 0.
    """

    text: str
    held_out: bool
    last: bool
    extra_bytes: int = 0

    @property
    def size(self) -> int:
        """The number of bytes of the corpus that this chunk accounts for."""
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
        """Return a digest that changes with the settings and the content. Every start computes it, so it has to be
        cheap.
        """

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield every document in order."""

    @abstractmethod
    def size(self) -> int:
        """Return the approximate number of bytes of text."""

    @abstractmethod
    def partition(self, size: int) -> Iterator[tuple["Corpus", int]]:
        """Yield consecutive parts of the corpus, each of about `size` bytes, as (part, its bytes).

        The chunks of all parts, in order, are exactly the chunks of the whole corpus. A part can be pickled.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return a short description of the corpus, for messages."""

    def chunks(self) -> Iterator[TextChunk]:
        """Yield every document's chunks in order. An empty document has none."""
        for document in self.documents():
            held_out = document.held_out
            if held_out is None:
                held_out = is_held_out(document.name, self.validation)
            yield from document_chunks(document.chunks, held_out, document.extra_bytes)

    def sample(self, limit: int, on_read: Callable[[TextChunk], None] = lambda chunk: None) -> Iterator[str]:
        """Yield about `limit` bytes of the training split, or all of it if it is smaller. The draw is even and
        deterministic.

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
    """A corpus whose documents a function yields. A plugin's data source returns one.

    Attributes:
        texts: yields (name, text) of every document, each time in the same order; names are unique.
        version: changes with the content; a new version invalidates the tokens in the cache.
        bytes: approximate size of the text, for progress and for the sample that a bpe is trained on.
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
        """Yield the whole corpus as one part: a function cannot start in the middle of the documents."""
        yield self, self.bytes

    def describe(self) -> str:
        return self.setting


def document_chunks(texts: Iterator[str], held_out: bool = False, extra_bytes: int = 0) -> Iterator[TextChunk]:
    """Yield the chunks of one document, with the last one marked."""
    for text, following in pairwise(chain(texts, (None,))):
        last = following is None
        yield TextChunk(text, held_out, last, extra_bytes if last else 0)


def require_training_text(setting: str, train: int, validation: int) -> None:
    """Check that a corpus has training tokens, given the number of tokens in each split.

    Raises:
        ConfigError: the training split is empty. The message begins with `setting`.
    """
    if train == 0:
        cause = "every document is in the validation split" if validation else "no document has any text"
        raise ConfigError(f"{setting}: nothing to train on, {cause}: give more data or set data.validation=0")


def is_held_out(name: str, fraction: float) -> bool:
    """Return True if the document `name` is in the validation split, which holds `fraction` of the documents."""
    return _hash_fraction("split", name) < fraction


def _hash_fraction(purpose: str, name: str | int) -> float:
    """Return a number in [0, 1) that depends only on the arguments. A new document therefore moves no other."""
    hashed = blake2b(os.fsencode(f"{purpose}:{name}"), digest_size=8).digest()
    return int.from_bytes(hashed, "little") / 2**64


_WORD_AT_LINE_END = re.compile(r"[^\W_](?=\r?\n)")


def text_chunks(read: Callable[[int], str]) -> Iterator[str]:
    """Yield the text that `read(characters)` returns, in chunks of at most CHUNK_CHARACTERS characters.

    A long text is split between a word and a line end if possible. Byte-level tokenizers split there anyway, so the
    tokens stay the same.
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
