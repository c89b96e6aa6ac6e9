"""A corpus as documents with names: which of them are held out, and the pieces of text that tokenising sees."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise

PIECE = 1 << 20  # characters of a document that are held and tokenised at a time
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """One text. `name` is unique in the corpus; `pieces` are its text in order, each at most PIECE characters."""

    name: str
    pieces: Iterator[str]
    held_out: bool | None = None  # None: its name decides


@dataclass(frozen=True)
class Part:
    """One piece of a document, as tokenising sees it."""

    text: str
    held_out: bool  # belongs to the validation split
    last: bool  # ends its document


class Corpus(ABC):
    """Documents in an order of their own.

    `setting` is the key and value an error message opens with. `validation` is the fraction of documents held out.
    """

    setting: str
    validation: float

    @abstractmethod
    def key(self) -> str:
        """A digest that changes with the settings and the content, cheap to compute at each start."""

    @abstractmethod
    def documents(self) -> Iterator[Document]: ...

    @abstractmethod
    def size(self) -> int:
        """Bytes of text, roughly."""

    @abstractmethod
    def cut(self, size: int) -> Iterator[tuple["Corpus", int]]:
        """Pieces of about `size` bytes, each with its bytes: their parts, one after the other, are those of the whole.
        They can be pickled."""

    @abstractmethod
    def describe(self) -> str:
        """What is about to be read, in words."""

    def parts(self) -> Iterator[Part]:
        """Every document's pieces, in order. Empty documents have none."""
        for document in self.documents():
            held_out = document.held_out
            if held_out is None:
                held_out = _fraction("split", document.name) < self.validation
            yield from parts_of(document.pieces, held_out)

    def sample(self, limit: int) -> Iterator[str]:
        """About `limit` bytes of the training split (all of it, if smaller), drawn evenly and always the same."""
        share = limit / max(self.size() * (1 - self.validation), 1)
        for number, part in enumerate(self.parts()):
            if not part.held_out and _fraction("sample", number) < share:
                yield part.text


def parts_of(texts: Iterator[str], held_out: bool = False) -> Iterator[Part]:
    """The pieces of one document as parts."""
    for text, following in pairwise(chain(texts, (None,))):
        yield Part(text, held_out, last=following is None)


def _fraction(purpose: str, name: str | int) -> float:
    """A number in [0, 1) that depends on the arguments alone, so that a new document moves no other."""
    hashed = blake2b(os.fsencode(f"{purpose}:{name}"), digest_size=8).digest()
    return int.from_bytes(hashed, "little") / 2**64


_CUT = re.compile(r"[^\W_](?=\r?\n)")


def pieces(read: Callable[[int], str]) -> Iterator[str]:
    """The text behind `read(characters)`, in pieces of at most PIECE characters.

    A long text is cut between a word and a line end, where byte-level tokenizers cut anyway: its tokens stay the same.
    """
    held = ""
    while chunk := read(PIECE - len(held)):
        held += chunk
        if len(held) == PIECE:
            *_, cut = chain((PIECE,), (match.end() for match in _CUT.finditer(held, PIECE // 2)))
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held
