"""Checks of lengths that depend on each other.

The sequence must fit the model's positions, the warmup must fit the run, and the run is given in steps or in epochs.
"""

from itertools import pairwise

from ndtrain.config.schema import Config, ConfigError, require


def choose_length(cfg: Config) -> None:
    """Choose between `train.steps` and `train.epochs`. A key given by the user overrides the recipe's other key.

    Raises:
        ConfigError: the user has given both, or the data has no epochs.
    """
    t, data = cfg.train, cfg.data
    if t.epochs is None:
        return
    if "train.steps" in cfg.given:
        require(
            "train.epochs" not in cfg.given,
            f"train.steps={t.steps} and train.epochs={t.epochs:g}: both set the run's length: give only one of them",
        )
        t.epochs = None
        return
    streams = data.streaming or data.name == "blend"
    what = (
        "data=blend repeats its corpora and has no epochs" if data.name == "blend" else "a stream has no known length"
    )
    require(not streams, f"train.epochs={t.epochs:g}: {what}: set train.steps, and train.epochs=null")


def check_batch_ramp(cfg: Config) -> None:
    """Check the stages of `train.batch_ramp`. Batches only grow, so the last step needs the most memory.

    Raises:
        ConfigError: a stage is not a pair of positive numbers, or does not have more sequences than the one before.
    """
    t = cfg.train
    key = f"train.batch_ramp={t.batch_ramp}"
    pairs = all(len(stage) == 2 and min(stage) >= 1 for stage in t.batch_ramp)
    require(pairs, f"{key}: each stage must be [sequences per step, number of steps], for example [[8,100],[16,200]]")
    sizes = [sequences for sequences, _ in t.batch_ramp] + [t.global_batch]
    require(
        all(a < b for a, b in pairwise(sizes)),
        f"{key}: batches must grow from stage to stage, up to less than train.global_batch={t.global_batch}",
    )


def check_positions(cfg: Config) -> None:
    """Check that a sequence has no more tokens than the model has positions.

    The number of positions is written to a checkpoint's config.json, and other programs accept no longer sequences.

    Raises:
        ConfigError: the sequence is longer.
    """
    length, positions = cfg.train.seq_len, cfg.model.max_position_embeddings
    if length <= positions:
        return
    if cfg.init_from and not cfg.moe.upcycle:
        fix = (
            "lower train.seq_len, or raise max_position_embeddings (and set rope_scaling) in the config.json of "
            f"init_from={cfg.init_from}"
        )
    else:
        fix = (
            f"set model.max_position_embeddings={length} (shorter-context weights also need model.rope_scaling), or "
            "lower train.seq_len"
        )
    raise ConfigError(f"train.seq_len={length} exceeds model.max_position_embeddings={positions}: {fix}")


def note_long_ramp(cfg: Config) -> None:
    """Add a note if the run ends before a batch of `train.global_batch`."""
    t = cfg.train
    if t.batch_sizes.ramp_steps >= t.steps:
        cfg.notes.append(
            f"train.batch_ramp lasts {t.batch_sizes.ramp_steps} steps, and train.steps={t.steps}: no step has "
            f"train.global_batch={t.global_batch} sequences"
        )


def fit_warmup(cfg: Config) -> None:
    """Shorten a recipe's warmup, with a note, if the user has given a shorter run but no warmup."""
    optim, given = cfg.optim, cfg.given
    length = cfg.train.steps if optim.decay_steps is None else optim.decay_steps
    shortened = "train.steps" in given or "optim.decay_steps" in given or cfg.train.epochs is not None
    fits = optim.schedule == "constant" or optim.warmup < length
    if fits or length < 1 or not shortened or "optim.warmup" in given:
        return
    warmup = max(1, length // 10) if length > 1 else 0
    steps = f"{length} step{'s' * (length > 1)}"
    cfg.notes.append(
        f"optim.warmup={optim.warmup} of the recipe is too long for {steps}: shortened to {warmup}; set "
        "optim.warmup to change it"
    )
    optim.warmup = warmup
