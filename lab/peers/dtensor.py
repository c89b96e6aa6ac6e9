"""The peers of axis=tp: a plain PyTorch Llama sharded by `parallelize_module`, as torchtitan shards its own.

Between its matmuls the model uses the same functions as ours (RMSNorm, RoPE, attention). Its plan wraps and
redistributes as little as possible. The comparison therefore measures only the parallelism.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from lab.peers.llama import Llama
from ndtrain.config import ModelConfig
from ndtrain.model.norm import rms_norm
from ndtrain.model.rope import rotate


class Norm(nn.Module):
    """RMSNorm of local tensors. With sequence parallelism each rank's gradient of the weight covers its own tokens, so
    it is a `Partial`. (`nn.RMSNorm` under `SequenceParallel` gives the same result in three times the time.)"""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(m.hidden_size)), m.rms_norm_eps

    def forward(self, x_BTE: Tensor) -> Tensor:
        w = self.weight
        return rms_norm(x_BTE, w.to_local(grad_placements=[Partial()]) if isinstance(w, DTensor) else w, self.eps)


def llama(m: ModelConfig) -> Llama:
    return Llama(m, Norm, rotate)


def parallelize(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard `model` over the one dim of `mesh`. Its forward and backward must run under `loss_parallel()`.

    Args:
        sequence_parallel: shard the residual stream along its tokens.
    """
    residual = Shard(1) if sequence_parallel else Replicate()
    # one wrapper in front of several matmuls sums their input gradients before they are sent
    gather = PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),))
    gather_with_rope = PrepareModuleInput(input_layouts=(residual, None), desired_input_layouts=(Replicate(), None))
    row = RowwiseParallel(output_layouts=residual)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "model.layers.*.self_attn": gather_with_rope,
        "model.layers.*.mlp": gather,
        **{f"model.layers.*.self_attn.{p}_proj": ColwiseParallel() for p in "qkv"},
        **{f"model.layers.*.mlp.{p}_proj": ColwiseParallel() for p in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.mlp.down_proj": row,
        "lm_head": ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    if sequence_parallel:
        for module in model.modules():
            if isinstance(module, Norm):
                module.weight = nn.Parameter(DTensor.from_local(module.weight.data, mesh, [Replicate()]))


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Sum the partial gradients, then clip all gradients by their norm over the whole model."""
    parameters = list(parameters)
    for p in parameters:
        if isinstance(p, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements, async_op=True)
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]  # one operator cannot mix DTensors and plain tensors
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in (sharded, whole) if kind]
    norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in (sharded, whole):
        nn.utils.clip_grads_with_norm_(kind, most, norm)
