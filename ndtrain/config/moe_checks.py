"""Checks and defaults of the load balancing of experts."""

from ndtrain.config import registry
from ndtrain.config.schema import Config, MoEConfig, require, written

SEQUENCE_COEF = 0.001  # default of moe.aux_coef with balance=sequence


def resolve_balance(cfg: Config) -> None:
    """Fill in `moe.balance` and `moe.aux_coef` for a model with experts.

    Raises:
        ConfigError: a dense model has keys of `moe`, or the family does not have the chosen loss. Also if
            `moe.aux_coef` is set for a balance without that loss, or `moe.upcycle` without `init_from`.
    """
    moe = cfg.moe
    family = registry.get("family", cfg.model.model_type)
    if family.moe is None:
        for key, default in vars(MoEConfig()).items():
            value = getattr(moe, key)
            require(
                value == default,
                f"moe.{key}={written(value)}: model.model_type={cfg.model.model_type} has no experts: remove it, or "
                f"reset the recipe's value with moe.{key}={written(default)}",
            )
        return
    require(
        not moe.upcycle or cfg.init_from is not None,
        "moe.upcycle=true starts the experts as copies of a dense model's MLPs: name its folder, init_from=FOLDER",
    )
    if moe.balance is None:
        asked = "hf" if cfg.model.output_router_logits else None
        moe.balance = asked or ("none" if cfg.init_from and not moe.upcycle else "bias")
    require(
        moe.balance != "hf" or "router_aux_loss_coef" in family.fields,
        f"moe.balance=hf: transformers has no such loss for {cfg.model.model_type}: use sequence or bias",
    )
    require(
        moe.aux_coef is None or moe.balance in ("sequence", "bias"),
        f"moe.aux_coef={moe.aux_coef}: moe.balance={moe.balance} does not use it: remove it, or reset the recipe's "
        "value with moe.aux_coef=null (the coefficient of moe.balance=hf is model.router_aux_loss_coef)",
    )
    if moe.aux_coef is None:
        moe.aux_coef = SEQUENCE_COEF if moe.balance == "sequence" else 0.0
