"""Names of keys and values in other trainers, with their names in ndtrain, to suggest fixes for unknown ones.

The other trainers are torchtitan, Megatron-LM, nanotron and Hugging Face's TrainingArguments. Everyday words are
included too.
"""

from collections.abc import Collection, Iterable

# ndtrain's key, or overrides with a remark after a semicolon -> its names elsewhere. A name without a dot is also
# recognised in any section: `optim.learning_rate`, `parallelism.tensor_parallel_degree`.
_MEANINGS: dict[str, str] = {
    "mesh.tp": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "mesh.pp": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size",
    "mesh.cp": "cp cp_size context_parallel context_parallel_size context_parallel_degree",
    "mesh.ep": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size "
    "expert_parallelism",
    "mesh.dp": "dp dp_replicate data_parallel_replicate_degree",
    "mesh.fsdp": "dp_shard fsdp fsdp_size data_parallel_shard_degree",
    "mesh.fsdp=-1; all remaining ranks": "dp_size data_parallel data_parallel_size "
    "data_parallel_degree world_size",
    "mesh.zero": "deepspeed zero zero_stage zero_optimization fsdp_reshard_after_forward "
    "data_parallel_sharding_strategy sharding_strategy",
    "mesh.fsdp with mesh.zero=1": "use_distributed_optimizer",
    "ranks=N or nodes=N for a plan; torchrun --nproc-per-node N for training": "gpus num_gpus "
    "n_gpus ngpus devices num_devices gpu nproc_per_node nproc num_processes ranks nodes nnodes num_nodes",
    "layout.rules.vocab=null": "disable_loss_parallel",
    "tp.sequence_parallel": "sequence_parallel sp",
    "tp.overlap": "tp_comm_overlap enable_async_tensor_parallel async_tp",
    "cp.kind": "cp_comm_type context_parallel_rotate_method",
    "cp.ulysses": "hierarchical_context_parallel_sizes ulysses sequence_parallel_size",
    "schedule": "pipeline_parallel_schedule pp_engine pipeline_schedule",
    "schedule.path": "pipeline_parallel_schedule_csv",
    "schedule.chunks": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
    "schedule.split": "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_split_points",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size pipeline_parallel_microbatch_size "
    "microbatch_size device_batch_size",
    "train.global_batch": "global_batch_size total_batch_size",
    "train.batch_ramp": "rampup_batch_size step_batch_size_schedule batch_size_schedule batch_warmup",
    "train.global_batch; each rank has train.global_batch / (mesh.dp x mesh.fsdp) sequences": "local_batch_size "
    "batch_size batch",
    "train.global_batch; the number of microbatches follows from it and train.micro_batch": "grad_accum grad_acc_steps "
    "gradient_accumulation_steps gradient_accumulation batch_accumulation_per_replica accumulate_grad_batches",
    "train.seq_len": "seq_length sequence_length max_seq_len max_seq_length max_length block_size "
    "context_length context_len",
    "train.steps": "max_steps train_iters train_steps num_steps total_steps max_iters iterations",
    "train.epochs": "num_train_epochs num_epochs",
    "train.log_every": "logging_steps log_interval log_freq iteration_step_info_interval",
    "train.eval_every": "eval_steps eval_interval eval_iters val_check_interval validation.freq validation.enabled "
    "eval_freq",
    "train.compile": "torch_compile compile.enable",
    "train.profile": "enable_profiling profile_step_start profile_step_end",
    "run.dir": "output_dir save save_dir out_dir checkpoints_path dump_folder job.dump_folder",
    "run.name": "run_name experiment_name exp_name",
    "run.seed": "random_seed",
    "recipe": "config config_file job.config_file",
    "optim": "optimizer optimizer_name optimizer.name",
    "optim.lr": "learning_rate base_lr peak_lr max_lr",
    "optim.min_lr": "lr_min min_learning_rate min_decay_lr final_lr",
    "optim.warmup": "warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters num_warmup_steps",
    "optim.warmup; a number of steps": "warmup_ratio lr_warmup_fraction warmup_fraction",
    "optim.decay_steps": "lr_decay_iters lr_decay_steps",
    "optim.wsd_decay": "decay_ratio lr_wsd_decay_iters",
    "optim.schedule": "lr_scheduler_type lr_decay_style decay_type lr_schedule lr_scheduler scheduler",
    "optim.lr_mult; a factor for each pattern of parameter names": "decoupled_lr",
    "optim.betas=[b1,b2]": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.weight_decay": "wd",
    "optim.clip": "max_grad_norm max_norm clip_grad grad_clip gradient_clip_val clip_grad_norm",
    "optim.state_dtype": "exp_avg_dtype exp_avg_sq_dtype",
    "optim.offload": "optimizer_cpu_offload enable_cpu_offload cpu_offload",
    "precision.compute=bf16": "bf16 bfloat16 mixed_precision mixed_precision_param dtype fp16 precision autocast amp "
    "torch_dtype",
    "precision.compute=fp8": "fp8 fp8_format converters float8",
    "recompute=full": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_activations "
    "activation_checkpoint ac",
    "recompute": "recompute_granularity activation_checkpoint.mode ac_mode",
    "recompute=every recompute.every=N": "recompute_num_layers recompute_method",
    "recompute=selective recompute.keep=[...]; the ops that are kept, not the recomputed ones": "recompute_modules "
    "selective_ac_option",
    "hardware.attention": "attention_backend attn_implementation attn_impl use_flash_attn flash_attention",
    "hardware.timeout_s": "distributed_timeout_minutes train_timeout_seconds ddp_timeout",
    "checkpoint.every": "save_steps save_interval checkpoint_interval checkpoint.interval ckpt_every",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "checkpoint.async_save": "async_save async_mode",
    "resume": "resume_from_checkpoint load load_path resume_checkpoint_path resume_from",
    "init_from": "init_checkpoint model_name_or_path pretrained_model_name_or_path initial_load_path pretrained",
    "logger": "report_to enable_wandb enable_tensorboard",
    "logger.project": "wandb_project",
    "plugins": "custom_import",
    "data.path": "dataset_path data_path train_data_path dataset_name hf_dataset_or_datasets dataset_folder",
    "data": "dataset",
    "data=chat; it computes the loss on the assistant's tokens": "assistant_only_loss completion_only_loss",
    "data.validation_path": "valid_data_path",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_model hf_tokenizer "
    "hf_assets_path",
    "data.text_key": "text_column_name text_column text_field",
    "data.eos_id": "append_eod eod eos_token_id",
    "data.pack": "reset_position_ids reset_attention_mask eod_mask_loss packing",
    "data.validation; the held-out fraction": "split split_ratio validation_split",
    "model.num_hidden_layers": "num_layers n_layers n_layer layers depth",
    "model.hidden_size": "dim d_model n_embd embed_dim",
    "model.intermediate_size": "ffn_hidden_size ffn_dim d_ff hidden_dim",
    "model.num_attention_heads": "n_heads n_head num_heads",
    "model.num_key_value_heads": "num_query_groups n_kv_heads num_kv_heads",
    "model.head_dim": "kv_channels",
    "model.rope_theta": "rotary_base rope_base",
    "model.tie_word_embeddings": "untie_embeddings_and_output_weights tie_embeddings weight_tying",
    "model.model_type": "add_qkv_bias qk_layernorm architecture model_name",
    "model.sliding_window": "window_size",
    "model.initializer_range": "init_method_std init_std",
    "model.rms_norm_eps": "norm_eps norm_epsilon layernorm_epsilon",
    "model.max_position_embeddings": "max_positions n_positions",
}  # fmt: skip
FOREIGN = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}

_VALUES: dict[str, str] = {  # ndtrain's value -> its names elsewhere
    "bf16": "fp16 float16 half bfloat16 bf16_mixed",
    "fp32": "float32 float single tf32",
    "fp64": "float64 double",
    "fp8": "float8 hybrid e4m3 fp8_e4m3",
    "uint16": "int16 u2",
    "uint32": "int32 u4",
    "adamw": "adam adam_w adamw_torch adamw_torch_fused fused_adam fusedadam",
    "cosine": "cosine_with_min_lr cosine_with_restarts cosine_annealing cos",
    "wsd": "warmup_stable_decay trapezoidal trapezoid",
    "constant": "constant_with_warmup none",
    "linear": "linear_with_warmup",
    "interleaved": "interleaved1f1b interleaved_1f1b",
    "zb_v": "zbvzerobubble zbv",
    "zb_h1": "zero_bubble zb1p",
    "dualpipe_v": "dualpipev dualpipe",
    "1f1b": "one_forward_one_backward",
    "hf": "huggingface datasets hf_datasets parquet hub c4",
    "jsonl": "json",
    "megatron": "indexed mmap",
    "datatrove": "nanoset",
    "selective": "op partial",
    "full": "true block",
    "flash": "flash_attention flash_attention_2 flash_attn fa2 fa3",
    "efficient": "mem_efficient xformers",
    "math": "eager unfused",
    "auto": "sdpa",
    "ring": "p2p allgather",
    "ulysses": "a2a all_to_all",
    "cuda": "gpu nccl",
    "wandb": "weights_and_biases",
}
_OURS = {name: value for value, names in _VALUES.items() for name in names.split()}
_INSTEAD = {  # values that belong to another key
    ("precision.params", "bf16"): "use precision.compute=bf16, with master weights in fp32; ",
    ("precision.params", "fp8"): "use precision.compute=fp8, with master weights in fp32; ",
}


def meaning_of(key: str, known: Collection[str]) -> str:
    """Return a hint for a key that does not exist: `did you mean 'optim.lr'? `, or `use ...; `. "" if there is none.

    Try three ways in this order:
    - The whole name is a name in other trainers.
    - Exactly one known key ends in the same part.
    - The last part of the name is a name in other trainers.
    """
    name = _plain(key)
    end = name.rpartition(".")[2]
    alike = [other for other in known if other.rpartition(".")[2] == end]
    if name in FOREIGN and name not in known:
        return _hint(FOREIGN[name])
    if len(alike) == 1:
        return _hint(alike[0])
    return _hint(FOREIGN[end]) if end in FOREIGN else ""


def meaning_of_value(key: str, value: str, known: Iterable[str]) -> str:
    """Return a hint for an invalid value of a key, `did you mean 'bf16'? `; "" if the word is unknown."""
    word = _plain(value)
    word = _OURS.get(word, word)
    instead = _INSTEAD.get((key, word))
    return instead or (f"did you mean {word!r}? " if word in known else "")


def _plain(name: str) -> str:
    return name.strip().lstrip("-+").replace("-", "_").lower()


def _hint(meaning: str) -> str:
    if "=" in meaning or ";" in meaning or " " in meaning:
        return f"use {meaning.replace('; ', ' (', 1)}{')' * ('; ' in meaning)}; "
    return f"did you mean {meaning!r}? "
