"""A block whose MLP is a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; Jiang et al., 2024,
arXiv:2401.04088).

Each matrix of each expert is a separate parameter, named as in Hugging Face's files. A unit's buffer stores gate and up
of all experts first, then down of all experts, as the table of ops groups them. One grouped matmul computes each group.

Shape legend: N tokens, X experts, K experts of a token, M rows (each token once per expert it goes to, sorted by
expert); R rows of this device's experts, E hidden_size, F an expert's intermediate size.
"""

import torch
from torch import Tensor, nn

from ndtrain.config import ModelConfig
from ndtrain.config.schema import resolved
from ndtrain.model.block import Block, Ops, Weights
from ndtrain.model.families.family import Family
from ndtrain.model.families.moe import MoE
from ndtrain.model.moe.exchange import Part
from ndtrain.model.moe.permutation import Permutation, combine, permute
from ndtrain.model.spec import COMBINE, DISPATCH, OUTPUT, Joins, OpSpec
from ndtrain.model.swiglu import swiglu


class MoEBlock(Block):
    """Pre-norm attention and a mixture of SwiGLU experts, each added to the residual stream."""

    selection_bias: Tensor

    def add_mlp(self, m: ModelConfig, family: Family) -> None:
        self.moe = resolved(family.moe)
        self.add_module(self.moe.module, self.make_mlp(m, family))
        # added to the router's scores when experts are chosen. Not a parameter: the loads change it, not a gradient
        self.register_buffer("selection_bias", torch.zeros(resolved(m.num_experts)), persistent=False)
        self._list_experts()

    def use(self, ops: Ops) -> None:
        super().use(ops)
        self._list_experts()

    def _list_experts(self) -> None:
        """List the weights of each projection in advance: with many experts this takes longer than a grouped matmul."""
        experts = self.mixture.experts.values()
        self._weights = [[getattr(e, p).weight for e in experts] for p in self.moe.projections]

    @property
    def mixture(self) -> nn.Module:
        return getattr(self, self.moe.module)

    def make_mlp(self, m: ModelConfig, family: Family) -> nn.Module:
        moe, mixture = resolved(family.moe), nn.Module()
        mixture.gate = Weights(m, "experts", "embed")
        if moe.shared:
            shared = nn.Module()
            shared.gate_proj = Weights(m, "shared_mlp", "embed")
            shared.up_proj = Weights(m, "shared_mlp", "embed")
            shared.down_proj = Weights(m, "embed", "shared_mlp")
            mixture.add_module(moe.shared.module, shared)
            if moe.shared.gated:
                mixture.add_module(f"{moe.shared.module}_gate", Weights(m, "one", "embed"))
        held = range(resolved(m.num_experts)) if self.held_experts is None else self.held_experts
        mixture.experts = nn.ModuleDict({str(x): self._make_expert(m, moe.projections, x) for x in held})
        return mixture

    @staticmethod
    def _make_expert(m: ModelConfig, projections: tuple[str, str, str], x: int) -> nn.Module:
        expert, (gate, up, down) = nn.Module(), projections
        expert.add_module(gate, Weights(m, "expert_mlp", "embed", expert=x))
        expert.add_module(up, Weights(m, "expert_mlp", "embed", expert=x))
        expert.add_module(down, Weights(m, "embed", "expert_mlp", expert=x))
        return expert

    @classmethod
    def mlp_ops(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        moe, experts = resolved(family.moe), range(resolved(m.num_experts))
        of_experts = lambda *names: (tuple(f"{moe.experts}.{x}.{name}" for x in experts for name in names),)
        gate, up, down = moe.projections
        return (
            OpSpec("router", ((f"{moe.module}.gate",),), wide=True),
            OpSpec(DISPATCH, outputs=("embed",), routed=True, joins=Joins.EXPERTS),
            *cls.shared_expert_ops(moe),
            OpSpec("experts", of_experts(gate, up), routed=True),
            OpSpec("experts_down", of_experts(down), routed=True, to_stream=True, read_by=COMBINE),
            OpSpec(COMBINE, outputs=("embed",), routed=True, joins=Joins.EXPERTS),
            OpSpec(OUTPUT, outputs=("embed",), joins=Joins.SLICES, last=True),  # the sum of `reduce_routed`
        )

    @classmethod
    def shared_expert_ops(cls, moe: MoE) -> tuple[OpSpec, ...]:
        if moe.shared is None:
            return ()
        shared = f"{moe.module}.{moe.shared.module}"
        gate = ((f"{shared}_gate",),) if moe.shared.gated else ()
        return (
            OpSpec("shared_expert", ((f"{shared}.gate_proj", f"{shared}.up_proj"), *gate)),
            OpSpec("shared_expert_down", ((f"{shared}.down_proj",),), joins=Joins.SLICES, to_stream=True),
        )

    def feed_forward(self, x_NE: Tensor) -> Tensor:
        logits_NX = self.ops.wide_linear(x_NE, self.mixture.gate.weight)
        routing = self.moe.route(self.m, logits_NX, self.selection_bias)
        permutation = Permutation.of(routing.experts, logits_NX.shape[1])
        weights_NK = self.ops.balance(logits_NX, routing, permutation.counts, self.selection_bias)
        routing = routing._replace(weights=weights_NK)
        routed_NE, weights_NK, permutation = self.ops.gather_routed(x_NE, routing, permutation)
        exchange = self.ops.exchange(permutation.counts, len(permutation.slots))
        sent = exchange.send(permute(routed_NE, permutation))
        shared_NE = self.shared_expert(x_NE) if self.moe.shared else None  # while rows travel
        parts = zip(exchange.parts, sent, strict=True)
        returned = [exchange.send_back(p, self.experts(exchange.receive(p, rows), p)) for p, rows in parts]
        y_NE = self.ops.reduce_routed(combine(exchange.to_tokens(returned), weights_NK, permutation))
        return y_NE if shared_NE is None else y_NE + shared_NE

    def experts(self, x_RE: Tensor, part: Part) -> Tensor:
        """Return the outputs of the experts of a part, for rows that are sorted by expert."""
        gates, ups, downs = (weights[part.experts] for weights in self._weights)
        gate_RF, up_RF = self.ops.grouped_linear(x_RE, part.expert_rows, [gates, ups])
        return self.ops.grouped_linear(swiglu(gate_RF, up_RF), part.expert_rows, [downs])[0]

    def shared_expert(self, x_NE: Tensor) -> Tensor:
        """Return the output of the expert that every token goes to, times the sigmoid of its gate if it has one."""
        how = resolved(self.moe.shared)
        shared = getattr(self.mixture, how.module)
        gate_NF, up_NF = self.linear(x_NE, shared.gate_proj, shared.up_proj)
        y_NE = self.linear(swiglu(gate_NF, up_NF), shared.down_proj)[0]
        if not how.gated:
            return y_NE
        return y_NE * torch.sigmoid(self.linear(x_NE, getattr(self.mixture, f"{how.module}_gate"))[0])
