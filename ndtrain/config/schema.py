"""The typed schema of a run: every key with its type, default, choices and bounds."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from omegaconf import II

from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.schedule import NAMES as SCHEDULES


class ConfigError(ValueError):
    """The error of a run that cannot start as configured. Its message is one line: the key, what is wrong, the fix."""


AXES = ("pp", "dp", "fsdp", "cp", "tp")
DATA_AXES = ("dp", "fsdp", "cp")  # axes with different tokens
GRADIENTS, DILOCO = "gradients", "diloco"  # values of `islands.sync`
# The ops whose results can be saved for recompute, in execution order: ops of every block, then ops that only blocks
# with experts have. A test compares them with the tables of the blocks, because config must not import the model.
SAVABLE_OPS = ("qkv_proj", "core", "o_proj", "gate_up_proj")
EXPERT_OPS = ("router", "dispatch", "experts", "combine", "shared_expert", "shared_expert_down")


def choice(default: str | None, *choices: str, part: str | None = None, several: bool = False) -> Any:
    """Declare a field that accepts only some values.

    Args:
        part: a kind of registered parts (`registry.KINDS`); the names of these parts are choices too.
        several: True if the value may also be a list of choices. The type of the field is then Any.
    """
    return field(default=default, metadata={"choices": choices, "part": part, "several": several})


def at_least(least: float, default: float | None, infinite: bool = False) -> Any:
    """Declare a number that is at least `least`, and finite unless `infinite`. None is accepted."""
    return field(default=default, metadata={"least": least, "infinite": infinite})


def positive(default: float | None, optional: bool = False) -> Any:
    """Declare a finite number above 0. None is accepted if `optional`."""
    return field(default=default, metadata={"positive": True, "optional": optional})


def require(ok: bool, message: str) -> None:
    """Raise ConfigError with the message unless `ok`."""
    if not ok:
        raise ConfigError(message)


def written(value: Any) -> Any:
    """Return the value as it is written in YAML and on the command line."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


Value = TypeVar("Value")


def resolved(value: Value | None) -> Value:
    """Return the value of a key whose default is filled in by `resolve`."""
    assert value is not None, "the configuration is not resolved"
    return value


@dataclass
class Section:
    """A section of the configuration. Its fields cannot be set once it is frozen."""

    if not TYPE_CHECKING:  # with this method, a type checker would accept any name for a field

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("_frozen"):
                raise ConfigError(
                    f"{name}={value}: the configuration is frozen: change a copy, which unfrozen() returns"
                )
            object.__setattr__(self, name, value)

    def freeze(self) -> None:
        """Freeze this section and all its subsections: setting a field then raises ConfigError."""
        for section in self.sections():
            section.freeze()
        object.__setattr__(self, "_frozen", True)

    @property
    def frozen(self) -> bool:
        return bool(self.__dict__.get("_frozen"))

    def unfrozen(self) -> Self:
        """Return a deep copy whose fields can be set."""
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
    name: str = "run"  # name of the run in loggers and in the default of run.dir
    dir: str = "runs/${run.name}"  # the run folder: configuration, metrics, checkpoints and logs
    seed: int = at_least(0, 0)  # random seed for the initial weights and the order of the data


@dataclass
class MeshConfig(Section):
    """Sizes of the mesh axes. One size may be -1, which means all remaining ranks."""

    name: str = "default"  # label of the mesh, without effect
    pp: int = 1  # pipeline parallel ranks: each has some of the layers
    dp: int = 1  # data parallel ranks: each has its own sequences and a full copy of the training state
    fsdp: int = 1  # data parallel ranks that shard parameters, gradients and optimizer state
    cp: int = 1  # context parallel ranks: each has a part of every sequence
    tp: int = 1  # tensor parallel ranks: each has a part of every matrix
    ep: int = at_least(1, 1)  # expert parallel ranks: each has some experts of a layer; divides dp x fsdp x cp
    order: list[str] = field(default_factory=lambda: list(AXES))  # order of the mesh axes, from outer to inner
    zero: int | None = None  # ZeRO stage of fsdp: 1 | 2 | 3; null: 3, or 1 if pp > 1


@dataclass
class LayoutConfig(Section):
    # mesh axis that shards each tensor dimension: tp, or null to replicate the dimension
    rules: dict[str, str | None] = field(
        default_factory=lambda: (
            dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "shared_mlp"), "tp") | {"expert_mlp": None}
        )
    )


@dataclass
class ModelConfig(Section):
    """The architecture. Keys have the names of the fields in Hugging Face's config.json."""

    name: str = "llama"  # label of the model, without effect
    model_type: str = choice("llama", part="family")  # model family, as in config.json
    vocab_size: int = at_least(1, 4096)  # rows of the embedding; all token ids must be below this number
    hidden_size: int = at_least(1, 256)  # width of the residual stream
    intermediate_size: int = at_least(1, 1024)  # width of the MLP
    num_hidden_layers: int = at_least(1, 8)  # number of transformer blocks
    num_attention_heads: int = at_least(1, 8)  # number of query heads
    # number of key and value heads; fewer than query heads: grouped-query attention
    num_key_value_heads: int = at_least(1, 4)
    head_dim: int | None = None  # width of an attention head; null: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048  # longest sequence that the model supports
    rms_norm_eps: float = positive(1e-5)  # epsilon of RMSNorm
    rope_theta: float = positive(10000.0)  # base of the rotary embedding's wavelengths
    rope_scaling: dict[str, Any] | None = field(
        default_factory=dict
    )  # scaling of the rotary embedding, e.g. {rope_type: llama3, factor: 32, ...}; empty or null: no scaling
    attention_bias: bool = False  # biases in the attention projections
    mlp_bias: bool = False  # biases in the MLP
    tie_word_embeddings: bool = False  # shared weights of the embedding and the output head
    # number of tokens that a token attends to, including itself; null: all earlier tokens
    sliding_window: int | None = None
    # limit c of the attention scores, which become c * tanh(score / c); null: no limit
    attn_logit_softcapping: float | None = positive(None, optional=True)
    alibi: bool = False  # linear biases by distance (ALiBi) instead of the rotary embedding
    # name of a plugin's function that changes the attention scores or the mask; null: no function
    attention: str | None = choice(None, part="attention_mod")
    initializer_range: float = at_least(0, 0.02)  # standard deviation of the initial weights
    # shell pattern of parameter names -> factor of the standard deviation of their initial weights; null: no factors
    init_mult: dict[str, float] | None = field(default_factory=dict)
    # muP: hidden_size of the narrower model that optim.lr and initializer_range were tuned on; null: as they are given
    mup_base: int | None = at_least(1, None)
    num_experts: int | None = at_least(1, None)  # number of experts in a layer; null: the model is dense
    num_experts_per_tok: int | None = at_least(1, None)  # number of experts that a token is routed to
    moe_intermediate_size: int | None = at_least(1, None)  # width of an expert; null: intermediate_size
    norm_topk_prob: bool = False  # normalisation of a token's expert weights, which then add up to 1
    # interval of layers with experts: with n, every n-th layer has experts, and the others have a dense MLP
    decoder_sparse_step: int = at_least(1, 1)
    mlp_only_layers: list[int] = field(default_factory=list)  # indices of layers that always have a dense MLP
    # width of the shared expert, which every token is routed to; null: no shared expert
    shared_expert_intermediate_size: int | None = at_least(1, None)
    # load-balancing loss of Hugging Face: true makes hf the default of moe.balance
    output_router_logits: bool = False
    # coefficient of the load-balancing loss of Hugging Face (moe.balance=hf)
    router_aux_loss_coef: float = at_least(0, 0.001)
    # largest absolute value of queries, keys and values, which are clipped to it; null: no clipping
    clip_qkv: float | None = positive(None, optional=True)
    # number of shared experts, which every token is routed to and which form one MLP; null: no shared experts
    n_shared_experts: int | None = at_least(1, None)
    first_k_dense_replace: int = at_least(0, 0)  # number of first layers with a dense MLP instead of experts
    n_group: int = at_least(1, 1)  # number of groups that the experts of a layer are divided into
    topk_group: int = at_least(1, 1)  # number of best groups, from which the experts of a token are chosen
    routed_scaling_factor: float = positive(1.0)  # factor of the weights of a token's routed experts
    q_lora_rank: int | None = at_least(1, None)  # latent attention: rank of the query latent; null: no query latent
    # latent attention: rank of the latent of keys and values; null: no latent attention
    kv_lora_rank: int | None = at_least(1, None)
    # latent attention: width of the part of a query or key head without rotary embedding
    qk_nope_head_dim: int | None = at_least(1, None)
    # latent attention: width of the rotary part of a query or key head; all heads share this part of the key
    qk_rope_head_dim: int | None = at_least(1, None)
    v_head_dim: int | None = at_least(1, None)  # latent attention: width of a value head
    # latent attention: rotation of neighbouring elements (true) or of the two halves of a head (false)
    rope_interleave: bool = True


@dataclass
class MoEConfig(Section):
    """Mixtures of experts: load balancing, communication and initial weights. A dense model uses none of these keys."""

    # method of load balancing; null: hf with model.output_router_logits, else none with init_from (without upcycle),
    # else bias
    balance: str | None = choice(None, "bias", "hf", "sequence", "none")
    bias_rate: float = at_least(0, 0.001)  # with balance=bias: change of an expert's routing bias per step
    # coefficient of the load-balancing loss per sequence; null: 0.001 with balance=sequence, else 0
    aux_coef: float | None = at_least(0, None)
    z_loss: float = at_least(0, 0.0)  # coefficient of the router z-loss
    overlap: bool = False  # with mesh.ep: overlap of the exchange of rows with the matmuls of the experts
    parts: int = at_least(2, 2)  # with overlap: number of parts in which a rank's experts exchange their rows
    # with mesh.ep: capacity factor, the buffer size divided by the mean number of rows; null: buffers sized to the rows
    capacity: float | None = at_least(1, None, infinite=True)
    # initialisation of the experts from the MLPs of the dense model in init_from; model.* then describes the new model
    upcycle: bool = False


@dataclass
class TrainConfig(Section):
    steps: int = at_least(1, 1000)  # planned length of the run, which learning-rate schedules refer to
    # number of passes over the training split, instead of train.steps; null: train.steps is the length of the run
    epochs: float | None = positive(None, optional=True)
    stop_at: int | None = None  # last step of this run, to stop before the planned end; null: no early stop
    seq_len: int = at_least(1, 256)  # tokens per sequence
    global_batch: int = at_least(1, 16)  # sequences per step over the whole mesh
    # stages with smaller batches before it, [sequences per step, number of steps] each, in ascending order
    batch_ramp: list[list[int]] = field(default_factory=list)
    # sequences per forward on each rank; null: the rank's whole share of the batch, or a fraction of it if pp > 1
    micro_batch: int | None = at_least(1, None)
    loss_chunk: int = at_least(1, 1024)  # tokens per chunk of the loss, which holds the logits of one chunk at a time
    # torch.compile of the blocks and the loss; auto: on with Triton on a GPU, or with a C++ compiler in a long CPU run
    compile: bool | str = choice("auto", "auto", "true", "false")
    log_every: int = at_least(1, 1)  # steps between lines on the console
    eval_every: int = at_least(0, 0)  # steps between evaluations on the whole validation split; 0: no evaluation
    sample_every: int = at_least(0, 0)  # steps between text samples generated by the model; 0: no samples
    # prompts of the text samples; an empty prompt begins a new document
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    sample_tokens: int = at_least(1, 32)  # tokens generated per text sample
    sample_temperature: float = at_least(0, 0.0)  # temperature of the text samples; 0: always the most likely token
    # consecutive skipped steps (non-finite loss or gradient) after which the run fails
    max_skipped: int = at_least(1, 10)
    trace: bool = False  # timeline of one step, measured and predicted, written to the run folder
    # step (10) or range of steps (10-12) that PyTorch's profiler records into the run folder; null: no profile
    profile: str | None = None

    @property
    def batch_sizes(self) -> BatchSizes:
        """The number of sequences of each step."""
        return BatchSizes(self.global_batch, tuple((sequences, steps) for sequences, steps in self.batch_ramp))

    @property
    def tokens(self) -> int:
        """The tokens of the planned run: of all `steps`."""
        return self.batch_sizes.before(self.steps) * self.seq_len

    @property
    def compile_asked(self) -> bool | None:
        """The value of `compile`, or None for auto. `compile_choice.choose_compile` decides in that case."""
        return {"true": True, "false": False}.get(written(self.compile))

    @property
    def profiled(self) -> range:
        """The steps that `profile` names.

        Raises:
            ConfigError: `profile` is neither a step nor a range of steps.
        """
        if self.profile is None:
            return range(0)
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", self.profile)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"train.profile={self.profile}: must be a step or a range of steps, counted from 1, e.g. 10 or 10-12"
            )
        return range(first, last + 1)


@dataclass
class PrecisionConfig(Section):
    params: str = choice("fp32", "fp32", "fp64")  # dtype of master weights, moments and gradients
    # dtype of matmuls and activations: fp64 | fp32 | bf16 | fp8 (only the blocks' weight matmuls in fp8, the rest in
    # bf16; due to rounding, fp8 gradients differ by some percent between meshes, and by more from bf16 gradients)
    compute: str = choice("fp32", "fp64", "fp32", "bf16", "fp8")


@dataclass
class ScheduleConfig(Section):
    name: str = choice("1f1b", *SCHEDULES)  # pipeline schedule: the order of forward and backward passes
    chunks: int | None = None  # stages per pipeline rank; null: 1, or 2 with interleaved, zb_v and dualpipe_v
    # number of layers per stage; the first and the last stage may have 0 layers; null: balanced by cost
    split: list[int] | None = None
    path: str | None = None  # with schedule=csv: file with the schedule table, one row per pp rank


@dataclass
class RecomputeConfig(Section):
    # choice of the activations that the backward pass computes again instead of keeping them
    name: str = choice("none", "none", "full", "selective", "every", "budget")
    # with recompute=every: number of blocks per recomputed group; auto: the square root of the number of blocks
    every: int | str = 1
    # with recompute=selective: ops whose results are kept: qkv_proj, core, o_proj, gate_up_proj; in blocks with experts
    # also router, dispatch, experts, combine, shared_expert, shared_expert_down
    keep: list[str] = field(default_factory=lambda: list(SAVABLE_OPS[1:]))
    # with recompute=budget: bytes of activations that a rank may hold, e.g. 2GiB or 500MB
    budget: int | str | None = None


@dataclass
class TPConfig(Section):
    sequence_parallel: bool = True  # sharding of the residual stream along its tokens
    overlap: bool = False  # overlap of communication with matmuls, by sending each message in one part per rank


@dataclass
class CPConfig(Section):
    # method: ring (keys and values are passed around) or ulysses (an all-to-all exchanges tokens for heads)
    kind: str = choice("ring", "ring", "ulysses")
    ulysses: int | None = None  # ranks that exchange tokens for heads; null: 1 with ring, mesh.cp with ulysses
    # assignment of tokens to ranks; auto: striped for packed documents, else zigzag
    balance: str = choice("auto", "auto", "zigzag", "striped", "none")


@dataclass
class ObjectiveConfig(Section):
    # the loss: cross_entropy, or weighted (cross entropy times the weight of each token in the data)
    name: str = choice("cross_entropy", part="objective")
    z_loss: float = at_least(0, 0.0)  # coefficient of the squared log-sum-exp of the logits, which keeps logits small


@dataclass
class OptimConfig(Section):
    name: str = choice("adamw", part="optimizer")  # name of the optimizer
    lr: float = positive(3e-4)  # peak learning rate
    min_lr: float = at_least(0, 0.0)  # learning rate at the end of the schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay rates of the first and the second moment
    eps: float = positive(1e-8)  # epsilon added to the square root of the second moment
    weight_decay: float = at_least(0, 0.1)  # decoupled weight decay, applied to matrices only
    # shell pattern of parameter names -> factor of their learning rate; if several patterns match, the last one wins;
    # null: no factors
    lr_mult: dict[str, float] | None = field(default_factory=dict)
    # shell pattern of parameter names -> factor of their weight decay; if several patterns match, the last one wins;
    # null: no factors
    wd_mult: dict[str, float] | None = field(default_factory=dict)
    mup_width: float | None = positive(None, optional=True)  # model.hidden_size / model.mup_base; null: filled in
    # maximum gradient norm; gradients with a larger norm are scaled down to it; null: no clipping
    clip: float | None = positive(1.0, optional=True)
    # maximum attention logit of a head; after an update, heads with a larger one get smaller query and key weights
    # (QK-Clip); null: no clipping
    qk_clip: float | None = positive(None, optional=True)
    schedule: str = choice("cosine", part="lr_schedule")  # schedule of the learning rate
    warmup: int = at_least(0, 0)  # steps of linear warmup
    decay_steps: int | None = None  # last step of the learning-rate schedule; null: train.steps
    wsd_decay: float = 0.2  # with schedule=wsd: fraction of decay_steps, at the end, in which the learning rate decays
    ema: float | None = None  # decay of the average of the weights that is saved in checkpoints; null: no average
    # dtype of the moments: fp32 | bf16 (rounded stochastically); null: as precision.params
    state_dtype: str | None = None
    offload: bool = False  # master weights and moments in host memory; the update then runs on the CPU
    # on resume from a checkpoint of another optimizer: state that starts from zero, instead of an error
    reset: bool = False
    # torch: name of an elementwise optimizer of torch.optim
    torch_name: str | None = None
    torch_args: dict[str, Any] | None = field(default_factory=dict)  # torch: arguments of that optimizer
    momentum: float = at_least(
        0, 0.95
    )  # muon: decay rate of the (Nesterov) momentum of hidden matrices; sgd: of momentum
    ns: str = choice("classic", "classic", "polar_express", "gram")  # muon: kind of Newton-Schulz iteration
    ns_steps: int = at_least(1, 5)  # muon: number of steps of the iteration
    # muon: dtype of the iteration, in which momentum and update are also sent to the owners of matrices and back
    ns_dtype: str = choice("bf16", "bf16", "fp32", "fp64")
    # muon: factor of the update of an A x B matrix. match_rms_adamw: 0.2 sqrt(max(A, B)), which makes it as large as
    # AdamW's; original: sqrt(max(1, A / B))
    adjust: str = choice("match_rms_adamw", "match_rms_adamw", "original")
    # muon: what is orthogonalised. matrices: whole matrices; heads: the rows of each head, in matrices that are divided
    # into heads
    split: str = choice("matrices", "matrices", "heads")
    # muon: scaling of the update. neurons: each row by a moving average of its squares, with the second of optim.betas
    # (NorMuon)
    normalize: str = choice("none", "none", "neurons")
    adamw_lr: float | None = positive(None, optional=True)  # muon: peak learning rate of other tensors; null: optim.lr


# sources whose files hold token ids
TOKEN_SOURCES = ("bin", "megatron", "llmc", "datatrove")


@dataclass
class DataConfig(Section):
    # kind of corpus
    name: str = choice("python", "python", "text", "jsonl", "chat", "hf", *TOKEN_SOURCES, "blend", part="source")
    # file, folder or glob (text, jsonl, chat, llmc, datatrove), prefix, folder or glob (megatron), file (bin), or hub
    # name, folder or file (hf)
    path: str | None = None
    # megatron, llmc, datatrove: list of paths, read one after the other, instead of data.path
    paths: list[str] | None = None
    tokenizer: str = "bpe"  # byte | bpe | path of a tokenizer.json or of a Hugging Face folder
    vocab_size: int = II("model.vocab_size")  # intended vocabulary size of a bpe tokenizer that is trained on the data
    text_key: str = "text"  # jsonl, hf: name of the field that holds the text
    subset: str | None = None  # hf: name of the dataset's subset (its configuration); null: the default subset
    split: str = "train"  # hf: split to train on
    # hf: split to validate on; null: a fraction of `split` (data.validation); with streaming, no validation
    eval_split: str | None = None
    streaming: bool = False  # hf: reading and tokenising during training, instead of before it
    # blend: list of corpora, each {weight: ..., name: ..., path: ...} with any other keys of data
    blend: list[dict[str, Any]] = field(default_factory=list)
    # bin: dtype of the token ids; datatrove: dtype if neither metadata nor an index describes it
    dtype: str = choice("uint16", "uint16", "uint32")
    shuffle: bool = True  # random order of the sequences, drawn from run.seed
    pack: bool = False  # documents in one sequence as separate texts, which do not attend to each other
    # token files: id of the token that ends a document; needed to pack documents that no index separates
    eos_id: int | None = None
    # token files: path of the validation data; null: a fraction of the documents (data.validation); with bin, only the
    # validation split of prepared data
    validation_path: str | None = None
    validation: float = 0.02  # fraction of the files or documents that is held out for validation
    # folder for tokenised corpora and trained tokenizers, shared by all runs
    cache: str = "${oc.env:NDTRAIN_CACHE,'~/.cache/ndtrain'}/data"
    # chat: date that chat templates use as the current date, fixed to make the data reproducible
    date: str = "2026-01-01"
    prefetch: int = at_least(1, 2)  # number of batches loaded in advance


@dataclass
class CheckpointConfig(Section):
    name: str = "default"  # label of the checkpoint options, without effect
    every: int = at_least(0, 0)  # steps between checkpoints; 0: only at the end and when the run is stopped
    keep: int = at_least(1, 2)  # number of newest checkpoints to keep
    keep_every: int = at_least(0, 0)  # steps between checkpoints that are kept permanently; 0: no such checkpoints
    async_save: bool = False  # writing in the background, from a copy in host memory
    # folder of the checkpoints, or address in an object store (s3://bucket/run); null: run.dir/checkpoints
    folder: str | None = None
    # files of a checkpoint. shared: as Hugging Face's tools read them; host: one per host, for many ranks (`ndtrain
    # checkpoint merge` makes the first from the second)
    layout: str = choice("shared", "shared", "host")
    max_file_bytes: int = at_least(
        1, 4 * 2**30
    )  # shared: maximum size of a safetensors file; larger models have several


@dataclass
class LoggerConfig(Section):
    name: Any = choice("wandb", "jsonl", part="logger", several=True)  # logger or loggers; metrics.jsonl always exists
    project: str = "ndtrain"  # wandb: project of the run
    entity: str | None = None  # wandb: user or team that owns the run; null: the user's default
    group: str | None = None  # wandb: group of runs that are shown together; null: no group
    tags: list[str] = field(default_factory=list)  # wandb: tags of the run

    @property
    def names(self) -> list[str]:
        """The names of the loggers, without duplicates."""
        return list(dict.fromkeys([self.name] if isinstance(self.name, str) else self.name))


@dataclass
class HardwareConfig(Section):
    name: str = "auto"  # label of the hardware, without effect
    device: str = choice("auto", "auto", "cpu", "cuda")  # device type; auto: cuda if there is a GPU, else cpu
    # peak TFLOP/s per device, for MFU; null: from the table of known GPUs, measured on a CPU
    peak_tflops: float | None = None
    # threads per rank on a CPU; null: OMP_NUM_THREADS, else 1 for a small model, else PyTorch's default
    threads: int | None = at_least(1, None)
    # attention kernel on a GPU; auto: the fastest kernel for the shapes of the run
    attention: str = choice("auto", "auto", "flash", "cudnn", "efficient", "flex", "math")
    timeout_s: float = at_least(1, 600.0)  # seconds until a collective times out


@dataclass
class IslandsConfig(Section):
    """Islands: whole jobs, each on its own mesh, that train one model together. Any of them may be lost."""

    count: int = at_least(0, 0)  # expected number of islands; 0: this job trains alone
    # address at which one of the islands listens, host:port, or a list of them. The island at the first one begins
    # the run. The others find it there
    address: Any = "127.0.0.1:29600"
    name: str | None = (
        None  # name of this island, which it keeps when it is restarted; null: the name of its run folder
    )
    wait_s: float = at_least(0, 600.0)  # seconds until the run begins with fewer islands than expected
    timeout_s: float = at_least(1, 10.0)  # seconds without a sign of life after which an island counts as lost
    # gradients: the islands add their gradients in every step; diloco: each trains alone for some steps, and then the
    # outer optimizer averages how far they have come
    sync: str = choice(GRADIENTS, GRADIENTS, DILOCO)
    inner_steps: int = at_least(1, 30)  # diloco: steps between two exchanges of the same weights (H)
    outer_lr: float | None = at_least(0, None)  # diloco: outer learning rate; null: by the number of islands
    outer_momentum: float = at_least(0, 0.9)  # diloco: Nesterov momentum of the outer optimizer
    codec: str = choice("fp32", "fp32", "bf16", "int8", "int4")  # diloco: type in which outer gradients are sent
    fragments: int = at_least(1, 1)  # diloco: parts of the model that are exchanged in turn
    delay: int = at_least(0, 0)  # diloco: inner steps that an exchange may take while training goes on
    grace_s: float = at_least(0, 30.0)  # diloco: seconds that islands wait for slower ones, which then stop earlier


@dataclass
class Config(Section):
    """The configuration of a run."""

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
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    # checkpoint to resume from: none | auto (newest checkpoint of run.dir) | path of a checkpoint or of a run folder
    # (its newest checkpoint). Without a recipe, the config.yaml of the run folder replaces it
    resume: str = "none"
    # source of the initial weights: Hugging Face folder, checkpoint or run folder (its newest checkpoint); null: random
    init_from: str | None = None
    plugins: list[str] = field(default_factory=list)  # modules that add parts to ndtrain (`ndtrain.plugins`)
    callbacks: dict[str, Any] = field(default_factory=dict)  # name of a plugin's callback -> its own keys

    # The attributes below are no fields, so neither files nor the command line can set them.
    given: ClassVar[frozenset[str]] = frozenset()  # the keys that the user has overridden
    notes: ClassVar[list[str]]  # messages for the user, collected while the configuration is resolved
    interpolated: ClassVar[dict[str, str]] = {}  # dotted key -> its text, for every value that contains ${...}

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", [])

    def with_given(self, keys: Iterable[str]) -> "Config":
        """Record the keys that the user has overridden. Return this configuration."""
        object.__setattr__(self, "given", frozenset(keys))
        return self

    @property
    def microbatches(self) -> int:
        """The number of microbatches per step on each rank, after `train.batch_ramp`. The mesh must be resolved."""
        return self.microbatches_of(self.train.global_batch)

    def with_batch(self, sequences: int) -> "Config":
        """Return a copy in which every step has this many sequences. The mesh must be resolved."""
        made = self.unfrozen()
        made.train.global_batch, made.train.batch_ramp = sequences, []
        made.freeze()
        return made

    def microbatches_of(self, sequences: int) -> int:
        """Return the number of microbatches on each rank in a step of this many sequences."""
        return sequences // (self.mesh.dp * self.mesh.fsdp * resolved(self.train.micro_batch))
