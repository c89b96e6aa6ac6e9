"""The sizes of what one rank computes of a microbatch, from the configuration alone."""

from dataclasses import dataclass

from ndtrain.config.schema import Config, resolved


def shards_stream(cfg: Config) -> bool:
    """Whether tp ranks hold different tokens of the residual stream."""
    return cfg.mesh.tp > 1 and cfg.tp.sequence_parallel


@dataclass(frozen=True)
class LocalShapes:
    """Sizes on one rank, for one microbatch. All ranks have the same, but for an uneven vocabulary.

    Attributes:
        tokens: of its part of the sequences.
        stream: (tokens, hidden_size) of the residual stream; sequence parallelism divides the tokens among tp ranks.
        heads, kv_heads: of its matmuls. K/V heads that several ranks need are held by each of them.
        intermediate_size: of its matmuls.
        routed_tokens: whose rows its experts compute.
        expert_parts: ranks that each have a slice of an expert.
        core_length: positions of one call of the attention core, which Ulysses gathers.
        core_heads, core_kv_heads: heads of that call, which Ulysses divides.
    """

    tokens: int
    stream: tuple[int, int]
    heads: int
    kv_heads: int
    intermediate_size: int
    routed_tokens: int
    expert_parts: int
    core_length: int
    core_heads: int
    core_kv_heads: int

    @classmethod
    def of(cls, cfg: Config) -> "LocalShapes":
        """Of a configuration whose mesh and micro_batch are resolved. `cp.ulysses=null` counts as 1."""
        m, t, mesh = cfg.model, cfg.train, cfg.mesh
        parts = lambda dim: mesh.tp if cfg.layout.rules.get(dim) == "tp" else 1
        ulysses = cfg.cp.ulysses or 1
        tokens = resolved(t.micro_batch) * t.seq_len // mesh.cp
        stream = tokens // (mesh.tp if shards_stream(cfg) else 1)
        heads, kv_heads = m.num_attention_heads // parts("heads"), max(1, m.num_key_value_heads // parts("kv_heads"))
        return cls(
            tokens=tokens,
            stream=(stream, m.hidden_size),
            heads=heads,
            kv_heads=kv_heads,
            intermediate_size=m.intermediate_size // parts("mlp"),
            routed_tokens=tokens if parts("expert_mlp") > 1 else stream,
            expert_parts=parts("expert_mlp"),
            core_length=t.seq_len * ulysses // mesh.cp,
            core_heads=max(1, heads // ulysses),
            core_kv_heads=max(1, kv_heads // ulysses),
        )
