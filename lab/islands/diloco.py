"""DiLoCo with several numbers of islands against data parallelism, at equal tokens, over a sweep of learning rates.

The runs are in one process (`in_one_process.py`). The loss is over the validation split, after some of the exchanges
and after the last step.
"""

import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from lab.islands import in_one_process
from lab.islands.figures import rounded
from lab.islands.options import OutOptions
from ndtrain.arguments import option
from ndtrain.config import load_config, resolve
from ndtrain.engine.trainer import Trainer
from ndtrain.engine.validation import Validation
from ndtrain.measure.results import save

MOMENTUM = 0.9


@dataclass(frozen=True)
class Options(OutOptions):
    """Options of the trial."""

    steps: int = option("inner steps of each run", 600)
    batch: int = option("rows of the global batch", 16)
    seq_len: int = option("tokens of a row", 64)
    inner_steps: int = option("inner steps between two exchanges", 15)
    lrs: str = option("inner learning rates, with commas", "1e-3,3e-3")
    outer_lrs: str = option("outer learning rates, with commas", "0.2,0.4,0.8")
    islands: str = option("numbers of islands, with commas", "1,2,4,8")
    codecs: str = option("codecs besides fp32, with the best learning rates, with commas", "bf16,int8,int4")
    points: int = option("losses of each run, at equal distances as far as exchanges allow", 20)
    fragments: int = option("fragments of a further run with 4 islands", 3)
    delay: int = option("delay of the run with fragments", 3)

    @property
    def moments(self) -> list[int]:
        """Steps after which the loss is measured. Islands have equal weights there."""
        exchanges = self.steps // self.inner_steps
        after = {max(1, round(exchanges * n / self.points)) * self.inner_steps for n in range(1, self.points)}
        return [*sorted(step for step in after if step < self.steps), self.steps]


class Case(NamedTuple):
    """A run of the sweep."""

    islands: int
    lr: float
    outer_lr: float
    codec: str = "fp32"
    fragments: int = 1
    delay: int = 0


def run(options: Options) -> bool:
    """Run the sweep, print it, and write it after each run. Return True."""
    lrs, outer_lrs, islands = (_floats(x) for x in (options.lrs, options.outer_lrs, options.islands))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:

        def measure(case: Case) -> None:
            found.append(_measured(Path(folder), options, case))
            save("islands diloco", options, cases=rounded(found, digits=6))

        for lr in lrs:
            measure(Case(0, lr, 0.0))
        for n, lr, outer_lr in product(map(int, islands), lrs, outer_lrs):
            measure(Case(n, lr, outer_lr))
        for case in _further(options, found):
            measure(case)
    _show(found)
    return True


def _further(options: Options, found: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the runs with the best learning rates of 4 islands: with each codec, and with fragments."""
    of_four = [x for x in found if x["islands"] == 4]
    if not of_four:
        return
    best = min(of_four, key=lambda x: x["loss"])
    rates = best["lr"], best["outer_lr"]
    for codec in filter(None, options.codecs.split(",")):
        yield Case(4, *rates, codec)
    if options.fragments > 1:
        yield Case(4, *rates, "int4", options.fragments, options.delay)


def _measured(folder: Path, options: Options, case: Case) -> dict[str, Any]:
    began = time.perf_counter()
    args = [
        "recipe=llama_debug", "logger=jsonl", "train.compile=false", "hardware.device=cpu", "hardware.peak_tflops=0.1",
        f"train.steps={options.steps}", f"train.global_batch={options.batch}", f"train.seq_len={options.seq_len}",
        f"model.max_position_embeddings={options.seq_len}", f"optim.lr={case.lr}", f"optim.min_lr={0.05 * case.lr}",
        f"optim.warmup={options.steps // 20}", "optim.betas=[0.9,0.99]", "data.validation=0.005",
        f"train.micro_batch={options.batch // max(1, case.islands)}",
        f"islands.inner_steps={options.inner_steps}", f"islands.codec={case.codec}",
        f"islands.fragments={case.fragments}", f"islands.delay={case.delay}",
    ]  # fmt: skip
    name = "-".join(map(str, case))
    if case.islands:
        rates = case.outer_lr, MOMENTUM
        made = in_one_process.train(folder / name, args, case.islands, rates, validation_loss, options.moments)
        losses, errors = made.losses, made.errors
    else:
        losses, errors = _data_parallel(folder / name, args, options.moments), []
    loss, error = losses[options.steps], sum(errors) / len(errors) if errors else 0.0
    print(f"{case}: loss {loss:.4f}, rounding error {error:.3g}, {time.perf_counter() - began:.0f} s", flush=True)
    return {**case._asdict(), "loss": loss, "error": error, "curve": [*losses.items()]}


def _data_parallel(folder: Path, args: list[str], moments: Collection[int]) -> dict[int, float]:
    """Return the losses of one model that trains on the whole batch, after the steps in `moments`."""
    trainer, losses = Trainer(resolve(load_config([*args, f"run.dir={folder}"]), 1)), {}
    for step in range(1, trainer.cfg.train.steps + 1):
        trainer.train_step.run(step, trainer.microbatches(trainer.source, step - 1))
        if step in moments:
            losses[step] = validation_loss(trainer)
    trainer.close()
    return losses


def validation_loss(trainer: Trainer) -> float:
    """Return the mean loss over the validation split."""
    return Validation(trainer.cfg, trainer.mesh, trainer.stages, trainer.data).run().loss


def _show(found: list[dict[str, Any]]) -> None:
    """Print the best loss of each number of islands, and its distance from data parallelism."""
    alone = min(x["loss"] for x in found if not x["islands"])
    print(f"data parallelism: {alone:.4f}")
    for n in sorted({x["islands"] for x in found} - {0}):
        best = min((x for x in found if x["islands"] == n and x["codec"] == "fp32"), key=lambda x: x["loss"])
        rates = f"rates {best['lr']:g} and {best['outer_lr']:g}"
        print(f"{n} islands: {best['loss']:.4f} ({best['loss'] / alone - 1:+.2%}) with {rates}")


def _floats(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]
