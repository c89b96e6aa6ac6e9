"""Text samples that the model generates during training (`train.sample_every`), on every mesh.

The trained stages compute the logits. Each new token is one forward pass over whole sequences, padded to
`train.seq_len`, without a KV cache. All data replicas compute the same texts.

Shape legend: B texts of a microbatch, N tokens of the residual stream on this rank, E hidden_size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ndtrain import schedule as schedules
from ndtrain.config import Config, LocalShapes
from ndtrain.data import Batch, Tokens, microbatches
from ndtrain.data.validation import ValidationSet
from ndtrain.engine.callback import Callback, due
from ndtrain.engine.executor import Executor
from ndtrain.engine.train_step import contexts
from ndtrain.mesh.collectives import all_reduce
from ndtrain.mesh.mesh import Mesh
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.model import Context
from ndtrain.model.sampling import next_tokens
from ndtrain.model.transformer import EMBED, HEAD
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import Stages
from ndtrain.parallel.pp import Pipeline
from ndtrain.program.passes import line_up


@dataclass(frozen=True)
class _Rows(Tokens):
    """Token sequences as a source of microbatches."""

    array: np.ndarray  # int64 [rows, T + 1]

    def tokens(self, step: int, rows: Sequence[int]) -> np.ndarray:
        return self.array[list(rows)]


class Sampler:
    """Continues token sequences on the stages of a run.

    Create one on every rank, and call the same methods in the same order.

    Args:
        texts: number of sequences that are continued at a time.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stages: Stages, texts: int):
        self._cfg, self._mesh, self._stages = cfg, mesh, stages
        count = -(-texts // cfg.train.micro_batch)
        schedule = schedules.forwards(replace(stages.placement.schedule, microbatches=count))
        self._rows = count * cfg.train.micro_batch
        last, segments = stages.placement.last, dict(stages.segments)
        if last in segments:
            *others, head = segments[last]
            segments[last] = [*others, replace(head, run=self._head)]
            self._model = stages.models[last]
        shapes = LocalShapes.of(cfg)
        pipeline = Pipeline(schedule, mesh, shapes.stream, stages.units.compute)
        layers = line_up(segments, last)
        self._executor = Executor(layers, stages, pipeline)
        self._layout = stages.layouts[f"{EMBED if cfg.model.tie_word_embeddings else HEAD}.weight"]
        self._shares_stream = shapes.shards_stream
        # created here on all ranks, because only some ranks run the head
        self._stream_group = mesh.group("cp", "tp") if self._shares_stream else mesh.group("cp")
        self._tp, self._pp, _ = mesh.group("tp"), mesh.group("pp"), mesh.world
        self._wide = torch.promote_types(stages.units.compute, torch.float32)

    def run(
        self, prompts: Sequence[Sequence[int]], new: int, eos: int | None, temperature: float, seed: int
    ) -> list[list[int]]:
        """Return the tokens that follow each prompt, the same on every rank.

        These are `new` tokens, or fewer if `eos` is chosen first.

        Args:
            prompts: sequences of one or more tokens. Only the last `train.seq_len` - `new` tokens of each are used.
        """
        texts = [list(p)[-(self._cfg.train.seq_len - new) :] for p in prompts]
        starts, draws = [len(t) for t in texts], torch.Generator().manual_seed(seed)
        ended = [False] * len(texts)
        for _ in range(new):
            chosen = next_tokens(self._logits(texts)[: len(texts)].cpu(), temperature, generator=draws)
            for i, token in enumerate(self._agree(chosen)):
                ended[i] = ended[i] or token == eos
                if not ended[i]:
                    texts[i].append(token)
            if all(ended):
                break
        return [text[start:] for text, start in zip(texts, starts, strict=True)]

    def _agree(self, chosen: Tensor) -> list[int]:
        """Return the choice of rank 0."""
        if self._mesh.world is None:
            return chosen.tolist()
        chosen = chosen.to(self._mesh.device)
        dist.broadcast(chosen, src=0, group=self._mesh.world)
        return chosen.tolist()

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after the last token of each text [rows, V], on every rank."""
        self._parts: list[Tensor] = []
        self._executor.run(contexts(self._stages, self._batches(texts), lambda: torch.ones(())))
        rows, vocabulary = self._rows, self._cfg.model.vocab_size
        if self._parts:
            logits = torch.cat(self._parts)
        else:
            logits = torch.zeros(rows, vocabulary, dtype=self._wide, device=self._mesh.device)
        all_reduce(logits, self._pp).wait()
        return logits

    def _batches(self, texts: Sequence[Sequence[int]]) -> list[Batch]:
        """Return the microbatches of the texts.

        Only the label after the last token of each text is set. It marks the position of this token, independently of
        how the sequence is sharded.
        """
        cfg, mesh = self._cfg, self._mesh
        tokens = np.full((self._rows, cfg.train.seq_len + 1), IGNORE, np.int64)
        marks = tokens.copy()
        for row, text in enumerate(texts):
            tokens[row, : len(text)], marks[row, len(text)] = text, 0
        sharding, part = SequenceSharding.of(cfg), mesh.index("cp")
        rows = range(self._rows)
        made = [microbatches(_Rows(x), 0, rows, cfg.train.micro_batch, sharding, part) for x in (tokens, marks)]
        batches = [replace(t, labels=m.labels) for t, m in zip(*made, strict=True)]
        return [ValidationSet.readable(b).to(mesh.device) for b in batches]

    def _head(self, x_NE: Tensor, ctx: Context) -> Tensor:
        """Store the logits of the marked tokens, and return a loss of 0. This replaces the head and the loss."""
        weight = self._model.head.weight
        x_BE = self._marked(x_NE, ctx)
        all_reduce(x_BE, self._stream_group).wait()
        logits = (x_BE.to(weight.dtype) @ weight.T).to(self._wide)
        if self._layout.shard_dim is not None:
            start, held = self._layout.shard[0]
            whole = logits.new_zeros(len(logits), self._cfg.model.vocab_size)
            whole[:, start : start + held] = logits
            all_reduce(whole, self._tp).wait()
            logits = whole
        self._parts.append(logits)
        return x_NE.new_zeros(1)

    def _marked(self, x_NE: Tensor, ctx: Context) -> Tensor:
        """Return the activation of the marked token of each row [B, E], or zeros if another rank has it."""
        (B, T), labels = ctx.targets.labels.shape, ctx.targets.labels.flatten()
        first = 0
        if self._shares_stream:
            first = self._mesh.index("tp") * len(x_NE)
            labels = labels[first : first + len(x_NE)]
        at = (labels != IGNORE).nonzero().flatten()
        out = torch.zeros(B, x_NE.shape[-1], dtype=self._wide, device=x_NE.device)
        out[(at + first) // T] = x_NE[at].to(self._wide)
        return out


class SampleCallback(Callback):
    """Continues `train.sample_prompts` every `train.sample_every` steps and after the last one.

    The texts are written to the console, the log, samples.jsonl and the logger.
    """

    def on_train_start(self) -> None:
        trainer, t = self.trainer, self.trainer.cfg.train
        self._sampler: Sampler | None = None
        if not t.sample_every:
            return
        tokenizer = trainer.data.tokenizer
        start = [] if trainer.data.eos_id is None else [trainer.data.eos_id]
        self._prompts = [ids or start for ids in tokenizer.encode_batch(list(t.sample_prompts))]
        self._new = min(t.sample_tokens, t.seq_len - 1)
        self._sampler = Sampler(trainer.cfg, trainer.mesh, trainer.stages, len(self._prompts))

    def after_step(self) -> dict[str, float]:
        trainer, t = self.trainer, self.trainer.cfg.train
        step = trainer.state.step
        if self._sampler is None or not (step == trainer.last_step or due(t.sample_every, step)):
            return {}
        seed = trainer.cfg.run.seed + step
        made = self._sampler.run(self._prompts, self._new, trainer.data.eos_id, t.sample_temperature, seed)
        decode = trainer.data.tokenizer.decode
        texts = [(prompt, decode(ids)) for prompt, ids in zip(t.sample_prompts, made, strict=True)]
        for prompt, text in texts:
            trainer.note(f"step {step}  sample: {prompt!r} -> {text!r}")
        if trainer.metrics:
            trainer.metrics.samples(step, texts)
        return {}
