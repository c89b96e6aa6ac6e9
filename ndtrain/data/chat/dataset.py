"""Opens the conversations of `data=chat`, as data that a run can train on."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ndtrain.config import Config, ConfigError
from ndtrain.config.store import folder_at
from ndtrain.data.batches import Source
from ndtrain.data.cache import digest
from ndtrain.data.chat.conversations import ChatCorpus, ChatFiles, tokenise_chat
from ndtrain.data.chat.packing import PackedConversations, PackedSequences, PackedValidation
from ndtrain.data.chat.template import TemplateError
from ndtrain.data.corpora import matching_files
from ndtrain.data.dataset import Data
from ndtrain.data.documents import SPLITS, require_training_text
from ndtrain.data.order import corpus_seed
from ndtrain.data.tokenizer import Tokenizer, load_tokenizer
from ndtrain.mesh.mesh import Mesh
from ndtrain.model.objective import column_names
from ndtrain.model.vocabulary import WEIGHTS


@dataclass(frozen=True, kw_only=True)
class ChatData(Data):
    """Conversations, packed into sequences.

    Attributes:
        packed: the training split.
        validation: the validation split; empty if it holds no conversation.
    """

    name: str
    corpus: ChatCorpus
    packed: PackedConversations
    validation: tuple[PackedConversations, ...] = ()

    def describe(self) -> str:
        return f"{self.corpus.train.rows:,} conversations in {self.packed.count:,} sequences"

    def warnings(self, cfg: Config) -> list[str]:
        """Warn about truncated and dropped conversations, rows that became several, unused weights, and data that one
        step repeats.
        """
        held, packed, length = self.corpus.train, self.packed, cfg.train.seq_len
        lines = []
        if packed.cut or packed.left_out:
            lines.append(
                f"{self.name}: {packed.cut + packed.left_out:,} of {len(held.ends):,} conversations are longer than "
                f"train.seq_len={length} tokens: {packed.cut:,} are truncated, and {packed.left_out:,}, whose "
                "answers begin later, are dropped; raise train.seq_len to train on them in full"
            )
        if len(held.ends) > held.rows:
            lines.append(
                f"{self.name}: {held.rows:,} rows became {len(held.ends):,} conversations: the chat template renders "
                "earlier turns differently from the last one, so these turns became separate conversations"
            )
        if held.has_weights and WEIGHTS not in column_names(cfg.objective):
            lines.append(
                f"{self.name}: objective={cfg.objective.name} ignores the weights of the rows, except that messages "
                "of weight 0 are not trained on; set objective=weighted to use them"
            )
        epochs = cfg.train.global_batch / packed.count
        if epochs > 1:
            lines.append(
                f"{self.name}: one step of train.global_batch={cfg.train.global_batch} reads it {epochs:.3g} times: it "
                f"has {packed.count:,} sequences of train.seq_len={length}; lower train.global_batch, or give more data"
            )
        return lines

    def sequences(self, cfg: Config, mesh: Mesh, step: int, saved: dict[str, Any] | None) -> Source:
        seed = corpus_seed(cfg.run.seed, 0)
        return PackedSequences(self.packed, cfg.train.batch_sizes, seed, cfg.data.shuffle, self.name)

    def validation_set(self, arrays: Any, cfg: Config) -> PackedValidation:
        return PackedValidation(arrays, cfg.train.seq_len, cfg.train.global_batch)

    def epoch_sequences(self, cfg: Config) -> int:
        return self.packed.count

    def everything(self) -> tuple[PackedConversations, ...]:
        return (self.packed, *self.validation)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({WEIGHTS})

    @property
    def turn_ends(self) -> frozenset[int]:
        return self.corpus.last


def open_chat(cfg: Config, cache: Path) -> ChatData:
    """Open the conversations of `cfg.data`, and tokenise them into the data cache if they are not there yet.

    Raises:
        ConfigError: there is no such file, a row cannot be trained on, or the tokenizer differs from the model's.
    """
    data = cfg.data
    root, names = matching_files(str(data.path), "*.jsonl")
    files = ChatFiles(f"data.path={data.path}", root, names, data.validation)
    tokenizer = load_tokenizer(data, lambda: [], cache)
    _require_same_tokenizer(cfg, tokenizer)
    try:
        template = tokenizer.chat_template(date.fromisoformat(data.date))
    except TemplateError as error:
        raise ConfigError(f"data.tokenizer={data.tokenizer}: {error}") from error
    corpus = tokenise_chat(files, template, tokenizer, cache)
    require_training_text(files.setting, len(corpus.train.ids), len(corpus.validation.ids))
    train, validation = (
        PackedConversations(split, cfg.train.seq_len, cache, digest(corpus.fingerprint, name))
        for split, name in zip((corpus.train, corpus.validation), SPLITS, strict=True)
    )
    if not train.count:
        raise ConfigError(
            f"{files.setting}: no conversation has an answer within its first train.seq_len={cfg.train.seq_len} "
            "tokens: raise train.seq_len"
        )
    return ChatData(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        fingerprint=corpus.fingerprint,
        eos_id=tokenizer.eos_id,
        validation=(validation,) if validation.count else (),
        name=files.setting,
        corpus=corpus,
        packed=train,
    )


def _require_same_tokenizer(cfg: Config, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer gives the same ids as the tokenizer of the model in `init_from`.

    Raises:
        ConfigError: the ids differ.
    """
    theirs = folder_at(cfg.init_from or "") / "tokenizer.json"
    if cfg.init_from and theirs.is_file() and not tokenizer.same_ids(theirs.read_bytes()):
        raise ConfigError(
            f"data.tokenizer={cfg.data.tokenizer}: its token ids differ from the tokenizer of "
            f"init_from={cfg.init_from}: set data.tokenizer={cfg.init_from}"
        )
