"""The typed schema of a run: every key with its type, default, choices and bounds."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from omegaconf import II

from ndtrain.schedule import NAMES as SCHEDULES


class ConfigError(ValueError):
    """A run that cannot start as configured. The message is one line: the key, what is wrong, the fix."""


AXES = ("pp", "dp", "fsdp", "cp", "tp")
DATA_AXES = ("dp", "fsdp", "cp")  # axes with different tokens
# The ops whose results a recompute can save: of every block, in the order they run, and of blocks with experts too. A
# test compares them with the blocks' tables, which nothing here can import.
SAVABLE_OPS = ("qkv_proj", "core", "o_proj", "gate_up_proj")
EXPERT_OPS = ("router", "dispatch", "experts", "combine", "shared_expert", "shared_expert_down")


def choice(default: str | None, *choices: str, part: str | None = None, several: bool = False) -> Any:
    """A field with one of some values.

    Args:
        part: the kind of registered parts whose names are choices too (`registry.KINDS`).
        several: the value may also be a list of choices. The type of the field is Any then.
    """
    return field(default=default, metadata={"choices": choices, "part": part, "several": several})


def at_least(least: float, default: float | None, infinite: bool = False) -> Any:
    """A number that is not below `least`, and finite unless `infinite`; None passes."""
    return field(default=default, metadata={"least": least, "infinite": infinite})


def positive(default: float | None, optional: bool = False) -> Any:
    """A finite number above 0, or None where it is optional."""
    return field(default=default, metadata={"positive": True, "optional": optional})


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with the message unless `ok`."""
    if not ok:
        raise ConfigError(message)


def written(value: Any) -> Any:
    """The value as it is written in YAML and on the command line."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


Value = TypeVar("Value")


def resolved(value: Value | None) -> Value:
    """The value of a key whose default `resolve` works out."""
    assert value is not None, "the configuration is not resolved"
    return value


@dataclass
class Section:
    """A part of the configuration. Its fields cannot be set once it is frozen."""

    if not TYPE_CHECKING:  # with this method, a type checker would accept any name for a field

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("_frozen"):
                raise ConfigError(
                    f"{name}={value}: the configuration is resolved and frozen: make a changed copy of it"
                )
            object.__setattr__(self, name, value)

    def freeze(self) -> None:
        """From now on setting a field raises ConfigError, here and in every section below."""
        for section in self.sections():
            section.freeze()
        object.__setattr__(self, "_frozen", True)

    @property
    def frozen(self) -> bool:
        return bool(self.__dict__.get("_frozen"))

    def unfrozen(self) -> Self:
        """A deep copy whose fields can be set."""
        made = copy.deepcopy(self)
        made._thaw()
        return made

    def _thaw(self) -> None:
        self.__dict__.pop("_frozen", None)
        for section in self.sections():
            section._thaw()

    def sections(self) -> Iterator["Section"]:
        for f in fields(self):
            value = getattr(self, f.name)
            if is_dataclass(value) and isinstance(value, Section):
                yield value


@dataclass
class RunConfig(Section):
    name: str = "run"  # shown by loggers, and the default folder's name
    dir: str = "runs/${run.name}"  # the run folder: configuration, metrics, checkpoints and logs
    seed: int = at_least(0, 0)  # of the initial weights and the order of the data


@dataclass
class MeshConfig(Section):
    """Sizes of the mesh axes; one may be -1, which means the remaining ranks."""

    name: str = "default"  # a label, without effect
    pp: int = 1  # pipeline parallel ranks: each has some of the layers
    dp: int = 1  # data parallel ranks: each has other sequences and all of the state
    fsdp: int = 1  # data parallel ranks that shard parameters, gradients and optimizer state
    cp: int = 1  # context parallel ranks: each has a part of every sequence
    tp: int = 1  # tensor parallel ranks: each has a part of every matrix
    ep: int = at_least(1, 1)  # ranks that share a layer's experts: folds over those of dp x fsdp x cp
    order: list[str] = field(default_factory=lambda: list(AXES))  # outer to inner
    zero: int | None = None  # 1 | 2 | 3; null: 3, or 1 where pp > 1


@dataclass
class LayoutConfig(Section):
    # of each dim: tp shards it, or null: every rank has it whole
    rules: dict[str, str | None] = field(
        default_factory=lambda: (
            dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "shared_mlp"), "tp") | {"expert_mlp": None}
        )
    )


@dataclass
class ModelConfig(Section):
    """Fields carry the names of Hugging Face's config.json."""

    name: str = "llama"  # a label for the console
    model_type: str = choice("llama", part="family")  # the family of the architecture
    vocab_size: int = at_least(1, 4096)  # rows of the embedding; the tokenizer's ids must be below it
    hidden_size: int = at_least(1, 256)  # width of the residual stream
    intermediate_size: int = at_least(1, 1024)  # width of the MLP
    num_hidden_layers: int = at_least(1, 8)  # transformer blocks
    num_attention_heads: int = at_least(1, 8)  # query heads
    num_key_value_heads: int = at_least(1, 4)  # key and value heads; fewer than query heads: grouped-query attention
    head_dim: int | None = None  # null: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048  # the longest sequence that the model is meant for
    rms_norm_eps: float = positive(1e-5)  # epsilon of RMSNorm
    rope_theta: float = positive(10000.0)  # base of the rotary embedding's wavelengths
    rope_scaling: dict[str, Any] | None = field(
        default_factory=dict
    )  # empty or null: none; e.g. {rope_type: llama3, factor: 32, ...}
    attention_bias: bool = False  # biases in the attention projections
    mlp_bias: bool = False  # biases in the MLP
    tie_word_embeddings: bool = False  # the output head shares the embedding's weights
    sliding_window: int | None = None  # tokens a token attends to, itself included
    attn_logit_softcapping: float | None = positive(None, optional=True)  # scores become c tanh(score / c)
    alibi: bool = False  # linear biases by distance instead of rotary positions
    attention: str | None = choice(None, part="attention_mod")  # a plugin's function of the scores or the mask
    initializer_range: float = at_least(0, 0.02)  # standard deviation of the initial weights
    # shell pattern of parameter names -> the factor of the standard deviation of their initial weights; null: none
    init_mult: dict[str, float] | None = field(default_factory=dict)
    # mixtures of experts; null: the model is dense
    num_experts: int | None = at_least(1, None)
    num_experts_per_tok: int | None = at_least(1, None)  # experts that a token goes to
    moe_intermediate_size: int | None = at_least(1, None)  # of an expert; null: intermediate_size
    norm_topk_prob: bool = False  # a token's weights add up to 1
    decoder_sparse_step: int = at_least(1, 1)  # every so many layers one has experts, the others a dense MLP
    mlp_only_layers: list[int] = field(default_factory=list)  # layers that have a dense MLP in any case
    shared_expert_intermediate_size: int | None = at_least(1, None)  # of the expert that every token goes to
    output_router_logits: bool = False  # whether the model is trained with Hugging Face's balance loss (moe.balance=hf)
    router_aux_loss_coef: float = at_least(0, 0.001)  # the factor of that loss
    clip_qkv: float | None = positive(None, optional=True)  # queries, keys and values are clipped to this size
    n_shared_experts: int | None = at_least(1, None)  # experts that every token goes to, as one MLP
    first_k_dense_replace: int = at_least(0, 0)  # so many first layers have a dense MLP
    n_group: int = at_least(1, 1)  # groups of experts, of which a token chooses from the best
    topk_group: int = at_least(1, 1)  # groups that a token chooses from
    routed_scaling_factor: float = positive(1.0)  # of the weights of a token's experts
    # latent attention; null: the model has none
    q_lora_rank: int | None = at_least(1, None)  # of the queries' latent; null: queries have none
    kv_lora_rank: int | None = at_least(1, None)  # of the latent of keys and values
    qk_nope_head_dim: int | None = at_least(1, None)  # of a head, the part that is not rotated
    qk_rope_head_dim: int | None = at_least(1, None)  # of a head, the part that is; its key is one for all heads
    v_head_dim: int | None = at_least(1, None)  # of a head's values
    rope_interleave: bool = True  # rotates neighbours, and not halves


@dataclass
class MoEConfig(Section):
    """Mixtures of experts: how their loads are balanced, and how they start. A dense model has none of it."""

    # null: bias, or of a Hugging Face folder what its config.json asks for: hf with output_router_logits, else none
    balance: str | None = choice(None, "bias", "hf", "sequence", "none")
    bias_rate: float = at_least(0, 0.001)  # with balance=bias: by how much a step changes the bias of an expert
    aux_coef: float | None = at_least(0, None)  # of the loss of sequences; null: 0.001 with balance=sequence, else 0
    z_loss: float = at_least(0, 0.0)  # the factor of the router's z-loss
    overlap: bool = False  # with mesh.ep: rows travel in parts, and one part is multiplied while others travel
    parts: int = at_least(2, 2)  # with overlap: how many
    # with mesh.ep: the size of buffers over the mean number of rows; null: as large as the rows need
    capacity: float | None = at_least(1, None, infinite=True)
    # the experts start as copies of the MLPs of a dense model, which init_from names; model.* is then the run's own
    upcycle: bool = False


@dataclass
class TrainConfig(Section):
    steps: int = at_least(1, 1000)  # the plan's length, which LR schedules refer to
    # instead of steps: passes over the training split, from which the data then gives the steps
    epochs: float | None = positive(None, optional=True)
    stop_at: int | None = None  # stop early after this step
    seq_len: int = at_least(1, 256)  # tokens of a sequence
    global_batch: int = at_least(1, 16)  # sequences per step over the whole mesh
    # sequences per forward per rank; null: its whole share, with pp a part of it
    micro_batch: int | None = at_least(1, None)
    loss_chunk: int = at_least(1, 1024)  # tokens whose logits exist at one time
    # the blocks and the loss; auto: on a GPU with Triton, and in a long run on a CPU with a C++ compiler
    compile: bool | str = choice("auto", "auto", "true", "false")
    log_every: int = at_least(1, 1)  # steps between the lines on the console
    eval_every: int = at_least(0, 0)  # steps between losses over the whole validation split; 0: never
    sample_every: int = at_least(0, 0)  # steps between texts that the model writes; 0: never
    sample_prompts: list[str] = field(default_factory=lambda: [""])  # what they start with; empty: a new document
    sample_tokens: int = at_least(1, 32)  # of each text
    sample_temperature: float = at_least(0, 0.0)  # 0: always the most likely token
    # so many steps in a row with a non-finite loss or gradient, which change nothing, end the run
    max_skipped: int = at_least(1, 10)
    trace: bool = False  # one step's timeline, measured and predicted, into the run folder
    profile: str | None = None  # a step, 10, or steps, 10-12: PyTorch's profile of them into the run folder

    @property
    def compile_asked(self) -> bool | None:
        """What `compile` says; None: auto. Whether the run compiles is `compile_choice.choose_compile`'s to say."""
        return {"true": True, "false": False}.get(written(self.compile))

    @property
    def profiled(self) -> range:
        """The steps that `profile` names.

        Raises:
            ConfigError: it names none.
        """
        if self.profile is None:
            return range(0)
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", self.profile)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(f"train.profile={self.profile}: must be a step from 1 on, or steps: 10, or 10-12")
        return range(first, last + 1)


@dataclass
class PrecisionConfig(Section):
    params: str = choice("fp32", "fp32", "fp64")  # master weights, moments and gradients
    # matmuls and activations: fp64 | fp32 | bf16 | fp8 (the blocks' weight matmuls in fp8, all else as bf16; rounding
    # makes its gradients differ from mesh to mesh by some percent, less than from those of bf16)
    compute: str = choice("fp32", "fp64", "fp32", "bf16", "fp8")


@dataclass
class ScheduleConfig(Section):
    name: str = choice("1f1b", *SCHEDULES)  # the order of forward and backward passes of a pipeline
    chunks: int | None = None  # stages a rank; null: 1, or 2 with interleaved, zb_v and dualpipe_v
    split: list[int] | None = None  # layers of each stage, perhaps 0 of the first and last; null: balanced by cost
    path: str | None = None  # csv: the table, a row for each pp rank


@dataclass
class RecomputeConfig(Section):
    # which activations are computed again in the backward pass instead of kept
    name: str = choice("none", "none", "full", "selective", "every", "budget")
    every: int | str = 1  # with recompute=every: keep one boundary in this many blocks; auto: the root of their number
    # with recompute=selective: the ops whose results a block keeps (qkv_proj, core, o_proj, gate_up_proj; with experts
    # router, dispatch, experts, combine, shared_expert, shared_expert_down too)
    keep: list[str] = field(default_factory=lambda: list(SAVABLE_OPS[1:]))
    budget: int | str | None = None  # with recompute=budget: bytes of activations a rank may hold, e.g. 2GiB or 500MB


@dataclass
class TPConfig(Section):
    sequence_parallel: bool = True  # shard the residual stream along its tokens
    overlap: bool = False  # send in as many parts as there are ranks, while the matmuls run


@dataclass
class CPConfig(Section):
    # ring: keys and values go around; ulysses: ranks exchange sequence for heads
    kind: str = choice("ring", "ring", "ulysses")
    ulysses: int | None = None  # ranks that exchange sequence for heads; null: 1 with ring, mesh.cp with ulysses
    # auto: striped for packed documents, else zigzag
    balance: str = choice("auto", "auto", "zigzag", "striped", "none")


@dataclass
class ObjectiveConfig(Section):
    # the loss: cross_entropy | weighted: multiplied by the weight that the data gives each token
    name: str = choice("cross_entropy", part="objective")
    z_loss: float = at_least(0, 0.0)  # factor of the squared log-sum-exp of the logits, which keeps logits small


@dataclass
class OptimConfig(Section):
    name: str = choice("adamw", part="optimizer")  # the optimizer
    lr: float = positive(3e-4)  # peak learning rate
    min_lr: float = at_least(0, 0.0)  # learning rate at the end of the schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of the first and the second moment
    eps: float = positive(1e-8)  # added to the root of the second moment
    weight_decay: float = at_least(0, 0.1)  # decoupled, of matrices only
    # shell pattern of parameter names -> the factor of their learning rate; of several that match the last one holds
    lr_mult: dict[str, float] | None = field(default_factory=dict)  # null: none
    wd_mult: dict[str, float] | None = field(default_factory=dict)  # the same for the weight decay
    # the gradient norm that gradients are scaled down to; null: no clipping
    clip: float | None = positive(1.0, optional=True)
    schedule: str = choice("cosine", part="lr_schedule")  # of the learning rate
    warmup: int = at_least(0, 0)  # steps
    decay_steps: int | None = None  # null: train.steps
    wsd_decay: float = 0.2  # with schedule=wsd: the last fraction of decay_steps that decays
    ema: float | None = None  # decay of an average of the weights, which checkpoints then hold too
    state_dtype: str | None = None  # the moments: null: as precision.params | fp32 | bf16 (rounded stochastically)
    offload: bool = False  # master weights and moments in host memory, where the update then runs


# sources that hold tokens already
TOKEN_SOURCES = ("bin", "megatron", "llmc", "datatrove")


@dataclass
class DataConfig(Section):
    # the kind of corpus
    name: str = choice("python", "python", "text", "jsonl", "chat", "hf", *TOKEN_SOURCES, "blend", part="source")
    # file, folder or glob (text, jsonl, chat, llmc, datatrove), prefix (megatron), a file (bin), hub name or local (hf)
    path: str | None = None
    paths: list[str] | None = None  # megatron, llmc, datatrove: several of these, read one after the other
    tokenizer: str = "bpe"  # byte | bpe | a tokenizer.json or Hugging Face folder
    vocab_size: int = II("model.vocab_size")  # what a trained bpe aims for
    text_key: str = "text"  # jsonl, hf: the field that holds the text
    subset: str | None = None  # hf: which configuration of the dataset
    split: str = "train"  # hf: the split to train on
    eval_split: str | None = None  # hf: the split to validate on; null: `validation` of the documents of `split`
    streaming: bool = False  # hf: read while training, without tokenising it first
    # blend: corpora with weights, each {weight: ..., name: ..., path: ...} and any other key of data
    blend: list[dict[str, Any]] = field(default_factory=list)
    dtype: str = choice("uint16", "uint16", "uint32")  # of a token: bin, and datatrove where no file beside it says so
    shuffle: bool = True  # whether sequences come in an order drawn from run.seed
    pack: bool = False  # documents that share a sequence do not attend to each other
    eos_id: int | None = None  # token files: the token that ends a document, which pack needs
    validation_path: str | None = None  # token files: the one to validate on; null: `validation`, none with bin
    validation: float = 0.02  # fraction of files (or documents) held out
    # folder for tokenised corpora and trained tokenizers, shared by runs
    cache: str = "${oc.env:NDTRAIN_CACHE,'~/.cache/ndtrain'}/data"
    date: str = "2026-01-01"  # chat: the day that a chat template which asks for today gets, so that data stays equal
    prefetch: int = at_least(1, 2)  # batches kept ready


@dataclass
class CheckpointConfig(Section):
    name: str = "default"  # a label, without effect
    every: int = at_least(0, 0)  # steps; 0: only at the end and on stop
    keep: int = at_least(1, 2)  # the newest
    keep_every: int = at_least(0, 0)  # and for good those of every so many steps; 0: none
    async_save: bool = False  # write in the background from a copy in host memory
    max_file_bytes: int = at_least(1, 4 * 2**30)  # of a safetensors file; more weights make several files


@dataclass
class LoggerConfig(Section):
    name: Any = choice("wandb", "jsonl", part="logger", several=True)  # metrics.jsonl is written with any
    project: str = "ndtrain"  # wandb: the project that shows the run
    entity: str | None = None  # wandb: the user or team that owns the run; null: the user's default
    group: str | None = None  # wandb: runs of one group are shown together
    tags: list[str] = field(default_factory=list)  # wandb

    @property
    def names(self) -> list[str]:
        """The loggers, each once."""
        return list(dict.fromkeys([self.name] if isinstance(self.name, str) else self.name))


@dataclass
class HardwareConfig(Section):
    name: str = "auto"  # a label of the option
    device: str = choice("auto", "auto", "cpu", "cuda")  # auto: a GPU if there is one
    peak_tflops: float | None = None  # per device; null: from the table of devices, measured for CPU
    # threads of a rank on the CPU; null: OMP_NUM_THREADS, else 1 for a small model, else PyTorch's number
    threads: int | None = at_least(1, None)
    # the kernel on a GPU; auto: the fastest on the run's shape
    attention: str = choice("auto", "auto", "flash", "cudnn", "efficient", "flex", "math")
    timeout_s: float = at_least(1, 600.0)  # deadline of a collective


@dataclass
class Config(Section):
    """One complete run."""

    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    tp: TPConfig = field(default_factory=TPConfig)
    cp: CPConfig = field(default_factory=CPConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    # none | auto: the newest checkpoint of run.dir | a checkpoint, or a run folder for its newest. With no recipe, the
    # run folder's config.yaml takes its place
    resume: str = "none"
    init_from: str | None = None  # a Hugging Face folder, a checkpoint, or a run folder (its newest checkpoint)
    plugins: list[str] = field(default_factory=list)  # modules that add parts to ndtrain (`ndtrain.plugins`)
    callbacks: dict[str, Any] = field(default_factory=dict)  # name of a plugin's callback -> its own keys

    # No fields: no file and no command line has them.
    given: ClassVar[frozenset[str]] = frozenset()  # the keys that the user has overridden
    notes: ClassVar[list[str]]  # what the user is to know once it is resolved
    interpolated: ClassVar[dict[str, str]] = {}  # dotted key -> its text, where that holds ${...}

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", [])

    def with_given(self, keys: Iterable[str]) -> "Config":
        """This configuration, which now knows which keys the user has overridden."""
        object.__setattr__(self, "given", frozenset(keys))
        return self

    @property
    def microbatches(self) -> int:
        """Of a step on each rank, once the mesh is resolved."""
        return self.train.global_batch // (self.mesh.dp * self.mesh.fsdp * resolved(self.train.micro_batch))
