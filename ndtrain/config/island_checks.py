"""The checks of `islands.*`."""

from pathlib import Path

from ndtrain.config import registry
from ndtrain.config.schema import DILOCO, Config, require, resolved

TOKEN = "NDTRAIN_ISLANDS_TOKEN"  # variable with a secret text that all islands of a run know
_SCHEDULES = ("gpipe", "1f1b", "interleaved")  # any number of microbatches, or any multiple of mesh.pp
_LOOPBACK = ("127.", "localhost", "[::1]")


def check_islands(cfg: Config) -> None:
    """Check that a run can be an island.

    Raises:
        ConfigError: it cannot; the message is one line.
    """
    islands = cfg.islands
    if not islands.count:
        return
    for door in addresses(cfg):
        host, _, port = door.rpartition(":")
        require(
            bool(host) and port.isdigit() and 0 < int(port) < 1 << 16,
            f"islands.address={door}: must be host:port, for example 10.0.0.1:29600",
        )
    require(
        cfg.mesh.pp == 1 or cfg.schedule.name in _SCHEDULES,
        f"schedule={cfg.schedule.name} needs a fixed number of microbatches, but the share of an island may change: "
        f"choose one of {', '.join(_SCHEDULES)}",
    )
    if islands.sync == DILOCO:
        _check_diloco(cfg)
    else:
        require(
            not (cfg.model.num_experts and cfg.moe.balance == "hf"),
            "moe.balance=hf needs the loads of all islands before a step: choose moe.balance=bias, sequence or none",
        )
        require(
            all(s.shape is None for s in registry.get("optimizer", cfg.optim.name).state_spec(cfg.optim)),
            f"optim={cfg.optim.name} has state of whole tensors, which a new island cannot read yet: choose "
            "optim=adamw, or islands.sync=diloco",
        )
        require(
            cfg.optim.qk_clip is None,
            f"optim.qk_clip={cfg.optim.qk_clip} needs the attention logits of all islands in every step: set it to "
            "null, or choose islands.sync=diloco",
        )
    require(
        not getattr(cfg.data, "streaming", False),
        "data.streaming=true reads a stream in order, but the rows of an island change: set data.streaming=false",
    )
    require(
        not cfg.train.batch_ramp,
        "train.batch_ramp: islands divide batches of one size among them: set train.batch_ramp=[]",
    )
    require(
        cfg.train.epochs is None, "train.epochs: islands need the number of steps: set train.steps, and epochs=null"
    )


def _check_diloco(cfg: Config) -> None:
    i = cfg.islands
    require(
        i.inner_steps % i.fragments == 0,
        f"islands.fragments={i.fragments} must divide islands.inner_steps={i.inner_steps}: fragments are exchanged "
        "at equal distances",
    )
    between = i.inner_steps // i.fragments
    require(
        i.delay < between,
        f"islands.delay={i.delay} must be less than islands.inner_steps / islands.fragments = {between}: an exchange "
        "has to end before the next one begins",
    )


def row_grain(cfg: Config) -> int:
    """Return the number that an island's rows are a multiple of. The configuration is resolved."""
    microbatches = cfg.mesh.pp if cfg.schedule.name == "interleaved" else 1
    return cfg.mesh.dp * cfg.mesh.fsdp * resolved(cfg.train.micro_batch) * microbatches


def addresses(cfg: Config) -> tuple[str, ...]:
    """Return the known addresses."""
    given = cfg.islands.address
    return tuple(str(x).strip() for x in (given if isinstance(given, list | tuple) else str(given).split(",")))


def is_on_this_host(door: str) -> bool:
    """Return True if an address is reachable on this host alone."""
    return door.startswith(_LOOPBACK)


def island_name(cfg: Config) -> str:
    """Return the name of an island: `islands.name`, or the name of its run folder."""
    return cfg.islands.name or Path(cfg.run.dir).resolve().name
