"""Lengths that two keys must agree on: of a sequence and the model's positions, of the warmup and the run."""

from ndtrain.config.schema import Config, ConfigError


def check_positions(cfg: Config) -> None:
    """Checks that a sequence has no more tokens than the model has positions.

    A checkpoint's config.json names the positions, and other programs allow no more.

    Raises:
        ConfigError: it has.
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
            f"set model.max_position_embeddings={length} (weights trained with less need model.rope_scaling, too), or "
            "lower train.seq_len"
        )
    raise ConfigError(
        f"train.seq_len={length} exceeds model.max_position_embeddings={positions}, which the checkpoint's config.json "
        f"will name: {fix}"
    )


def fit_warmup(cfg: Config) -> None:
    """Shortens a recipe's warmup where the user has given a shorter run and no warmup. A note says so."""
    optim, given = cfg.optim, cfg.given
    length = cfg.train.steps if optim.decay_steps is None else optim.decay_steps
    shortened = "train.steps" in given or "optim.decay_steps" in given
    fits = optim.schedule == "constant" or optim.warmup < length
    if fits or length < 1 or not shortened or "optim.warmup" in given:
        return
    warmup = max(1, length // 10) if length > 1 else 0
    steps = f"{length} step{'s' * (length > 1)}"
    cfg.notes.append(
        f"optim.warmup={optim.warmup} of the recipe does not fit into {steps}: it is {warmup} in this run; give "
        "optim.warmup to choose it"
    )
    optim.warmup = warmup
