"""The peer of axis=pp: ndtrain's model as stages of `torch.distributed.pipelining`.

ndtrain's placement assigns layers to stages and stages to ranks, so ours and the peer do the same work on the same
ranks.

Shape legend: B batch, T time, E hidden_size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from ndtrain.config import Config, ConfigError, LocalShapes
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import Transformer
from ndtrain.model.loss import head_loss
from ndtrain.model.vocabulary import Targets
from ndtrain.parallel.build import DTYPES
from ndtrain.parallel.distribution import Distribution


class Peer(NamedTuple):
    """A schedule of PyTorch's.

    Attributes:
        name: its class.
        looped: it takes a list of stages, even if a rank has only one.
        at_least: number of ranks -> number of microbatches it needs.
        rounds: it takes microbatches in equal rounds, each with at least one microbatch per rank.
    """

    name: str
    looped: bool = True
    at_least: Callable[[int], int] = lambda ranks: 1
    rounds: bool = False


SCHEDULES = {
    "gpipe": Peer("ScheduleGPipe", looped=False),
    "1f1b": Peer("Schedule1F1B", looped=False, at_least=lambda ranks: ranks),
    "interleaved": Peer("ScheduleInterleaved1F1B", rounds=True),
    "zb_h1": Peer("ScheduleInterleavedZeroBubble", rounds=True),  # with one chunk per rank it is ZB-H1
    "zb_v": Peer("ScheduleZBVZeroBubble"),
    "dualpipe_v": Peer("ScheduleDualPipeV", at_least=lambda ranks: 2 * ranks),
}


def check(schedule: str, ranks: int, microbatches: int) -> None:
    """Check that PyTorch has the schedule and that it accepts this number of microbatches.

    Raises:
        ConfigError: PyTorch lacks the schedule, or the number does not fit it.
    """
    peer = SCHEDULES[schedule]
    least = peer.at_least(ranks)
    if microbatches < least:
        raise ConfigError(f"accumulate={microbatches}: PyTorch's {schedule} needs at least {least} microbatches")
    rounds = max(1, microbatches // ranks)
    if peer.rounds and microbatches % rounds:
        raise ConfigError(f"accumulate={microbatches}: PyTorch's {schedule} needs {rounds} equal rounds of them")
    if not hasattr(pipelining, peer.name):
        raise ConfigError(f"schedule={schedule}: torch {torch.__version__} has no {peer.name}")


class Stage(nn.Module):
    """A stage of the model. The first takes tokens [B, T], the others hidden states [N, E]. All return hidden states:
    the head is part of the loss.

    Args:
        part: the stage with its parameters.
    """

    def __init__(self, part: Transformer, cfg: Config):
        super().__init__()
        self.part = part
        self._segments = part.segments()[:-1] if part.last else part.segments()
        tokens = torch.zeros(cfg.train.micro_batch, cfg.train.seq_len, dtype=torch.long)
        # positions are the same in every microbatch, so one rotary table serves all
        self._context = part.context(tokens, tokens, DTYPES[cfg.precision.compute])

    def forward(self, x: Tensor) -> Tensor:
        ctx = self._context._replace(tokens=x) if self.part.first else self._context  # later stages read only the shape
        for segment in self._segments:
            x = segment.run(x, ctx)
        return x


def stages(cfg: Config, mesh: Mesh) -> dict[int, Stage]:
    """Return this rank's stages by their index, with uninitialised parameters."""
    at = Distribution.of(cfg).placement
    return {
        s: Stage(Transformer(cfg.model, at.layers[s], s == 0, s == at.last, cfg.train.loss_chunk), cfg)
        for s in at.schedule.stages_of(mesh.coords["pp"])
    }


class Pipeline:
    """PyTorch's schedule over this rank's stages.

    Args:
        group: the ranks' group, over which they send.
        modules: by stage index, in compute precision.
        head: the output embedding if this rank has the last stage, else None.
    """

    def __init__(
        self,
        cfg: Config,
        device: torch.device,
        group: dist.ProcessGroup,
        modules: dict[int, nn.Module],
        head: nn.Parameter | None,
    ):
        self.head, self.compute, self.chunk = head, DTYPES[cfg.precision.compute], cfg.train.loss_chunk
        count = Distribution.of(cfg).placement.schedule.stages
        self.first, self.last = 0 in modules, count - 1 in modules
        parts = [
            pipelining.PipelineStage(module, s, count, device, **_examples(cfg, first=s == 0), group=group)
            for s, module in modules.items()
        ]
        peer = SCHEDULES[cfg.schedule.name]
        make = getattr(pipelining, peer.name)
        self._schedule = make(parts if peer.looped else parts[0], cfg.microbatches, self._loss, scale_grads=False)

    def gradients(self, tokens: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """Add every microbatch's gradients to the parameters' gradients.

        Args:
            tokens, labels: [microbatches x B, T].
            scale: factor of the sum of all token losses.

        Returns:
            The scaled sum of the losses if this rank has the last stage, else zero.
        """
        self._scale, losses = scale, []
        inputs = (tokens,) if self.first else ()
        target = labels if self.last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    def _loss(self, x_NE: Tensor, labels_BT: Tensor) -> Tensor:
        return head_loss(x_NE, self.head.to(self.compute), Targets(labels_BT), self._scale, self.chunk).sum()


def _examples(cfg: Config, first: bool) -> dict[str, Tensor]:
    """Return meta inputs and outputs of a stage, so that PyTorch need not run it to find their shapes."""
    stream, dtype = LocalShapes.of(cfg).stream, DTYPES[cfg.precision.compute]
    hidden = torch.empty(stream, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(cfg.train.micro_batch, cfg.train.seq_len, dtype=torch.long, device="meta")
    return {"input_args": tokens if first else hidden, "output_args": hidden}


def clip(parameters: Iterable[nn.Parameter], most: float, group: dist.ProcessGroup) -> None:
    """Apply `torch.nn.utils.clip_grad_norm_` to parameters that are spread over the ranks of `group`."""
    own: Sequence[nn.Parameter] = list(parameters)
    square = nn.utils.get_total_norm([p.grad for p in own]).square_()
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(own, most, square.sqrt_())
