"""The implementations that `bench peers` compares. Each builder returns a function that runs one optimizer step of the
same training.

Every implementation starts from the weights of `run.seed`. A step does a trainer's whole work:
- forward and backward of all microbatches
- the mean gradient over the valid tokens of the global batch
- clipping by the global norm
- AdamW (decay on matrices only)
- the global batch's mean loss as a float
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from lab.peers import dtensor, pipelining
from ndtrain.config import Config, ModelConfig, resolve
from ndtrain.data import Batch
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.mesh.sharding import BATCH_AXES
from ndtrain.model import Transformer, params
from ndtrain.model.families import family_of
from ndtrain.model.families.hf_config import to_hf
from ndtrain.model.init import fill, standard_normal
from ndtrain.model.vocabulary import IGNORE
from ndtrain.parallel.build import DTYPES, build_stages, initialise

Step = Callable[[Sequence[Batch]], float]  # this rank's microbatches -> mean loss of the global batch
Draw = Callable[[int, str, int, int], Tensor]  # (seed, parameter, first element, count) -> N(0, 1) elements

# -------------------------------------------------------------------------------------------------------------- ours


def ours(cfg: Config, mesh: Mesh) -> Step:
    """Build ndtrain's own step."""
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, numbers = TrainingStep(cfg, mesh, stages), count(1)
    return lambda batches: step.run(next(numbers), batches).wait().loss


def local(cfg: Config, mesh: Mesh) -> Step:
    """Build ndtrain's step on each rank alone, with the same number of tokens per rank and no communication. Its
    optimizer updates the whole model, while fsdp's updates a part."""
    alone = cfg.unfrozen()
    alone.mesh.dp = alone.mesh.fsdp = 1
    alone.train.global_batch //= mesh.size(*BATCH_AXES)
    resolve(alone, world_size=1)
    return ours(alone, Mesh(MeshSpec.of(alone.mesh), 0, mesh.device))


# ------------------------------------------------------------------------------------------------------------- peers


class Loop:
    """A plain PyTorch training loop's step.

    Args:
        module: (tokens, labels) -> sum of token losses.
        ranks: number of ranks that share the loss; `module` averages their gradients.
        synchronised: returns the context of a microbatch; its argument is True for the step's last microbatch.
        clip: (parameters, most): scales the parameters' gradients to a global norm of at most `most`.
    """

    def __init__(
        self,
        cfg: Config,
        module: nn.Module,
        ranks: int = 1,
        synchronised: Callable[[bool], AbstractContextManager] = lambda last: nullcontext(),
        clip: Callable[[Iterable[nn.Parameter], float], object] = nn.utils.clip_grad_norm_,
    ):
        self.module, self.ranks, self.synchronised = module, ranks, synchronised
        self.clip = lambda: clip(module.parameters(), cfg.optim.clip)
        o, parameters = cfg.optim, list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=tuple(o.betas), eps=o.eps, fused=True)

    def __call__(self, batches: Sequence[Batch]) -> float:
        return self.launch(batches)[0].item()

    def launch(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor | None]:
        """Queue a step. Return its mean loss over the global batch and the result of `clip`, both on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        mean = self._gradients(batches)
        norm = self.clip()
        self.optimizer.step()
        self._sum(mean)()
        return mean, norm

    def _gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Run all microbatches forward and backward. Return this rank's share of the mean loss."""
        valid = sum((b.labels != IGNORE).sum() for b in batches)
        wait = self._sum(valid)  # overlaps the first forward
        total = torch.zeros((), device=valid.device)
        for i, batch in enumerate(batches):
            with self.synchronised(i == len(batches) - 1):
                loss = self.module(batch.tokens, batch.labels)
                if i == 0:
                    wait()
                (loss * (self.ranks / valid)).backward()
            total += loss.detach()
        return total / valid

    def _sum(self, x: Tensor) -> Callable[[], object]:
        """Start to sum `x` over the ranks in place. Return a function that waits for the sum."""
        return dist.all_reduce(x, async_op=True).wait if self.ranks > 1 else lambda: None


class Pipelined(Loop):
    """The same step with the model's stages spread over ranks.

    Args:
        modules: this rank's stages by their index.
        head: the output embedding if this rank has the last stage, else None.
    """

    def __init__(self, cfg: Config, mesh: Mesh, modules: dict[int, nn.Module], head: nn.Parameter | None):
        group = own_group()
        clip = partial(pipelining.clip, group=group)
        super().__init__(cfg, nn.ModuleList(modules.values()), mesh.size("pp"), clip=clip)
        self.pipeline = pipelining.Pipeline(cfg, mesh.device, group, modules, head)

    def _gradients(self, batches: Sequence[Batch]) -> Tensor:
        tokens, labels = torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches])
        return self.pipeline.gradients(tokens, labels, 1 / (labels != IGNORE).sum())


class Cast(nn.Module):
    """Computes in `dtype` from the wider parameters of `module`. Gradients accumulate in the parameters' precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: Tensor) -> Tensor:
        narrow = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, narrow, args)


class HuggingFace(nn.Module):
    """`transformers`' own model and loss, with our model's signature."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(m)), attn_implementation="sdpa")

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        # with one item to divide by, its loss is the sum
        return self.causal_lm(
            input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=1, use_cache=False
        ).loss


def bare(cfg: Config, mesh: Mesh) -> Step:
    """Build a PyTorch loop over ndtrain's model, in one process."""
    return Loop(cfg, _in_compute_precision(cfg, _plain(cfg)))


def transformers(cfg: Config, mesh: Mesh) -> Step:
    """Build the same loop over `transformers`' model of the same shape."""
    module = HuggingFace(cfg.model)
    fill_parameters(cfg, module.causal_lm)
    return Loop(cfg, _in_compute_precision(cfg, module))


def ddp(cfg: Config, mesh: Mesh) -> Step:
    """Build a loop with DistributedDataParallel over ndtrain's model."""
    accumulates = cfg.train.global_batch > mesh.size("dp") * cfg.train.micro_batch
    module = DistributedDataParallel(
        _in_compute_precision(cfg, _plain(cfg)),
        gradient_as_bucket_view=True,
        static_graph=not accumulates,  # with no_sync, a static graph would miss the first microbatches
    )
    return Loop(cfg, module, mesh.size("dp"), lambda last: nullcontext() if last else module.no_sync())


def fsdp2(cfg: Config, mesh: Mesh) -> Step:
    """Build a loop with FSDP2 over ndtrain's model. Each block is a unit; the root has the rest."""
    module, zero = _plain(cfg), cfg.mesh.zero
    narrow = {"param_dtype": DTYPES[cfg.precision.compute], "reduce_dtype": DTYPES[cfg.precision.params]}
    # rotary tables are inputs too, and stay in fp32
    policy = MixedPrecisionPolicy(**narrow, cast_forward_inputs=False) if _narrows(cfg) else MixedPrecisionPolicy()
    for block in module.model.layers.values():
        fully_shard(block, reshard_after_forward=zero == 3, mp_policy=policy)
    fully_shard(module, reshard_after_forward=None if zero == 3 else False, mp_policy=policy)

    def synchronised(last: bool) -> AbstractContextManager:
        module.set_requires_gradient_sync(last or zero > 1)
        module.set_reshard_after_backward(last or zero == 3)
        return nullcontext()

    return Loop(cfg, module, mesh.size("fsdp"), synchronised)


def dtensor_tp(cfg: Config, mesh: Mesh, sequence_parallel: bool = False) -> Step:
    """Build a loop with DTensor tensor parallelism and a vocabulary-parallel loss."""
    module = dtensor.llama(cfg.model)
    fill_parameters(cfg, module)
    own = DeviceMesh.from_group(own_group(), mesh.device.type)
    dtensor.parallelize(module, own, sequence_parallel)
    return Loop(cfg, _in_compute_precision(cfg, module), 1, lambda last: loss_parallel(), dtensor.clip)


def dtensor_tp_sp(cfg: Config, mesh: Mesh) -> Step:
    """Build the loop of `dtensor_tp` with sequence parallelism."""
    return dtensor_tp(cfg, mesh, sequence_parallel=True)


def torch_pipelining(cfg: Config, mesh: Mesh) -> Step:
    """Build a loop with torch.distributed.pipelining over ndtrain's model, with the same stages as ours."""
    stages = pipelining.stages(cfg, mesh)
    for stage in stages.values():
        fill_parameters(cfg, stage.part)
    head = next((stage.part.head.weight for stage in stages.values() if stage.part.last), None)
    return Pipelined(cfg, mesh, {s: _in_compute_precision(cfg, stage) for s, stage in stages.items()}, head)


def _plain(cfg: Config) -> Transformer:
    module = Transformer(cfg.model, loss_chunk=cfg.train.loss_chunk)
    fill_parameters(cfg, module)
    return module


def own_group() -> dist.ProcessGroup:
    """Create a group of all ranks for a peer. No peer communicates over our groups, as in a program without ndtrain."""
    group = dist.new_group()
    assert group is not None, "every rank is in the group"
    return group


def fill_parameters(cfg: Config, module: nn.Module, draw: Draw = standard_normal) -> None:
    """Fill the parameters with the initial weights of `run.seed`, drawn by `draw`."""
    table = params(cfg.model)
    for name, p in module.named_parameters():
        for own, tensor in _by_expert(cfg.model, name, p.data):
            fill(tensor.view(-1), cfg.model, cfg.run.seed, table[own], 0, draw)


def _by_expert(m: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) for a parameter. `transformers` stores the gates and ups of all experts in one
    parameter, [X, 2 F, E], and their downs in another, [X, E, F]."""
    experts, separator, stack = name.partition(".experts.")
    moe = family_of(m).moe
    if moe is None or not separator or stack not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    gate, up, down = moe.projections
    for x, matrices in enumerate(tensor):
        own = zip((gate, up), matrices.chunk(2), strict=True) if stack == "gate_up_proj" else [(down, matrices)]
        yield from ((f"{experts}.experts.{x}.{projection}.weight", matrix) for projection, matrix in own)


def _narrows(cfg: Config) -> bool:
    return cfg.precision.compute != cfg.precision.params


def _in_compute_precision(cfg: Config, module: nn.Module) -> nn.Module:
    return Cast(module, DTYPES[cfg.precision.compute]) if _narrows(cfg) else module


IMPLEMENTATIONS: dict[str, Callable[[Config, Mesh], Step]] = {
    "ours": ours, "local": local, "bare": bare, "transformers": transformers, "ddp": ddp, "fsdp2": fsdp2,
    "dtensor_tp": dtensor_tp, "dtensor_tp_sp": dtensor_tp_sp, "torch_pipelining": torch_pipelining,
}  # fmt: skip
