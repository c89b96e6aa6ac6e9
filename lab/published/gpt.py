"""The ungated decoder of the published GPT runs, for plans only: no recipe or checkpoint uses it.

Its MLP has two matrices and a GELU between them. Norms and rotary positions are Llama's, since LayerNorm and learned
positions cost about the same.

Shape legend: N tokens of the residual stream, E hidden_size, F intermediate_size.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from ndtrain.config import ModelConfig
from ndtrain.model.block import Block, Weights
from ndtrain.model.families.family import Family
from ndtrain.model.spec import OpSpec
from ndtrain.plugins import register_family


class UngatedBlock(Block):
    """Pre-norm attention and an MLP without a gate, as in GPT-2 (Radford et al., 2019)."""

    def make_mlp(self, m: ModelConfig, family: Family) -> nn.Module:
        mlp = nn.Module()
        mlp.up_proj = Weights(m, "mlp", "embed")
        mlp.down_proj = Weights(m, "embed", "mlp")
        return mlp

    @classmethod
    def mlp_ops(cls, m: ModelConfig, family: Family) -> tuple[OpSpec, ...]:
        into, out = super().mlp_ops(m, family)
        return replace(into, projections=(("mlp.up_proj",),)), out

    def feed_forward(self, x_NE: Tensor) -> Tensor:
        (up_NF,) = self.linear(x_NE, self.mlp.up_proj)
        return self.linear(F.gelu(up_NF, approximate="tanh"), self.mlp.down_proj)[0]


GPT = register_family(Family("gpt", "GPT", block=UngatedBlock))
