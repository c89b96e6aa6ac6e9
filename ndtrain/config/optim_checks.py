"""Checks of the section `optim`."""

from collections.abc import Collection

from ndtrain.config.name_patterns import check_factors
from ndtrain.config.registry import get
from ndtrain.config.schema import Config, OptimConfig, require

SHIPPED = ("adamw", "muon", "sgd", "lion", "torch")
# keys that only some of these optimizers read; a plugin's optimizer may read any
_READERS: dict[str, Collection[str]] = {
    "state_dtype": ("adamw", "muon"),
    "momentum": ("muon", "sgd"),
    **dict.fromkeys(("ns", "ns_steps", "ns_dtype", "adjust", "split", "normalize", "adamw_lr"), ("muon",)),
    **dict.fromkeys(("torch_name", "torch_args"), ("torch",)),
}


def check_optim(optim: OptimConfig) -> None:
    """Check the values, and that the optimizer reads the keys that are set.

    Raises:
        ConfigError: a value is wrong, or a key has no effect.
    """
    check_factors("optim.lr_mult", optim.lr_mult)
    check_factors("optim.wd_mult", optim.wd_mult)
    require(
        len(optim.betas) == 2 and all(0 <= b < 1 for b in optim.betas),
        f"optim.betas={optim.betas}: must be two numbers in [0, 1)",
    )
    require(optim.ema is None or 0 < optim.ema < 1, f"optim.ema={optim.ema}: must be in (0, 1), or null for no average")
    require(0 < optim.wsd_decay <= 1, f"optim.wsd_decay={optim.wsd_decay}: must be in (0, 1]")
    require(optim.momentum < 1, f"optim.momentum={optim.momentum}: must be in [0, 1)")
    steps = optim.decay_steps
    require(steps is None or steps >= 1, f"optim.decay_steps={steps}: must be at least 1, or null for train.steps")
    for key, readers in _READERS.items():
        value, default = getattr(optim, key), getattr(OptimConfig(), key)
        others = " or ".join(f"optim={name}" for name in readers)
        require(
            optim.name not in SHIPPED or optim.name in readers or value in (default, None),
            f"optim.{key}={value}: optim={optim.name} does not read it: leave it at "
            f"{'null' if default is None else default}, or choose {others}",
        )


def check_qk_clip(cfg: Config) -> None:
    """Check that smaller query and key weights make attention logits smaller.

    Raises:
        ConfigError: they do not, because queries and keys are normalised.
    """
    m, family = cfg.model, get("family", cfg.model.model_type)
    require(
        cfg.optim.qk_clip is None or not (family.qk_norm or family.qk_norm_of_all_heads),
        f"optim.qk_clip={cfg.optim.qk_clip}: model.model_type={m.model_type} normalises queries and keys, so the size "
        "of their weights has no effect: set optim.qk_clip=null",
    )


def resolve_mup(cfg: Config) -> None:
    """Set `optim.mup_width`, the width relative to `model.mup_base`.

    Raises:
        ConfigError: muP is not defined for the model or the optimizer, or another width is set.
    """
    m, optim = cfg.model, cfg.optim
    width = None if m.mup_base is None else m.hidden_size / m.mup_base
    require(
        optim.mup_width in (None, width),
        f"optim.mup_width={optim.mup_width}: it follows from model.mup_base={m.mup_base}: leave it at null",
    )
    if width is None:
        return
    require(
        not m.tie_word_embeddings,
        f"model.mup_base={m.mup_base}: the head needs another learning rate than the embedding: set "
        "model.tie_word_embeddings=false",
    )
    require(
        get("optimizer", optim.name).width_power(optim) is not None,
        f"model.mup_base={m.mup_base}: how the learning rate of optim={optim.name} depends on the width is not known: "
        "choose optim=adamw, lion or muon",
    )
    optim.mup_width = width
