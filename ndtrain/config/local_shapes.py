"""The sizes of a rank's tensors for one microbatch, derived from the configuration alone."""

from dataclasses import dataclass

from ndtrain.config.schema import Config, resolved


@dataclass(frozen=True)
class LocalShapes:
    """Sizes on one rank, for one microbatch. All ranks have the same sizes, except with an uneven vocabulary.

    Attributes:
        sequences, seq_len: number of sequences, and the length of each over all ranks of cp.
        length: the positions of each sequence that the rank holds.
        shards_stream: True if the tp ranks hold different tokens of the residual stream.
        tokens: number of tokens in the rank's part of the sequences.
        stream: (tokens, hidden_size) of the residual stream; sequence parallelism divides the tokens among tp ranks.
        heads, kv_heads: number of heads in the rank's matmuls. If several ranks need a K/V head, each of them holds it.
        intermediate_size: width of the rank's MLP.
        routed_tokens: number of tokens that the rank routes to experts.
        expert_parts: number of ranks that share one expert, each with a slice of it.
        core_length: number of positions in one call of the attention core, after Ulysses has gathered them.
        core_heads, core_kv_heads: number of heads in one call of the attention core, after Ulysses has divided them.
    """

    sequences: int
    seq_len: int
    length: int
    shards_stream: bool
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
        """Compute the sizes for a configuration with resolved mesh and micro_batch. `cp.ulysses=null` counts as 1."""
        m, t, mesh = cfg.model, cfg.train, cfg.mesh
        parts = lambda dim: mesh.tp if cfg.layout.rules.get(dim) == "tp" else 1
        ulysses = cfg.cp.ulysses or 1
        sequences, shards_stream = resolved(t.micro_batch), mesh.tp > 1 and cfg.tp.sequence_parallel
        tokens = sequences * t.seq_len // mesh.cp
        stream = tokens // (mesh.tp if shards_stream else 1)
        heads, kv_heads = m.num_attention_heads // parts("heads"), max(1, m.num_key_value_heads // parts("kv_heads"))
        return cls(
            sequences=sequences,
            seq_len=t.seq_len,
            length=t.seq_len // mesh.cp,
            shards_stream=shards_stream,
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
