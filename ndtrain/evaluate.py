"""The validation loss of a checkpoint, on any data and any mesh.

python -m ndtrain.evaluate CHECKPOINT [data=... data.path=... key=value ...]
torchrun --nproc-per-node 2 -m ndtrain.evaluate CHECKPOINT mesh.tp=2

CHECKPOINT is a folder step-*, a run folder (its newest checkpoint), or a Hugging Face folder. Model, data, sequence
length and precision come from the checkpoint. Overrides work as in training: data.*, mesh.*, precision.*,
train.seq_len, schedule, cp.*, tp.*, hardware.*. Other data is read with the tokenizer of the checkpoint. A Hugging
Face folder does not name its training data: give data=... and train.seq_len=... too.

  split   validation: the held-out documents | all: every document (default: validation)
"""

import math
import os
import sys
import time
from collections.abc import Sequence

from ndtrain.arguments import ArgumentError, one_of, wants_help
from ndtrain.config import ConfigError, world_from_env
from ndtrain.config.store import folder_at
from ndtrain.engine.evaluate import Result, evaluate
from ndtrain.run.failure_report import status_of_command

SPLITS = ("validation", "all")


def main(args: Sequence[str]) -> int:
    """Print the loss on rank 0. If the evaluation cannot start, print the reason in one line and return 2."""
    if not args or wants_help(args):
        print((__doc__ or "").strip())
        return 0 if args else 2
    rank, _, _ = world_from_env()
    try:
        if "=" in args[0] and not folder_at(args[0]).exists():
            raise ConfigError(
                f"{args[0]}: the first argument must be a checkpoint: ndtrain evaluate CHECKPOINT [key=value ...]"
            )
        words = [word for word in args[1:] if not word.startswith("split=")]
        splits = [word.removeprefix("split=") for word in args[1:] if word not in words] or [SPLITS[0]]
        result = evaluate(folder_at(args[0]), words, one_of("split", splits[-1], SPLITS) == "all")
    except (ArgumentError, ConfigError) as error:
        if rank > 0:
            time.sleep(1)  # if this rank ended first, torchrun would end rank 0 before it prints the error
        print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return 2
    if rank == 0:
        print(describe(result), flush=True)
    return 0


def describe(r: Result) -> str:
    """Return the result in one line."""
    perplexity = math.exp(r.loss) if r.loss < 700 else math.inf
    numbers = f"eval_loss {r.loss:.10f}  perplexity {perplexity:.6g}  {r.tokens:,} tokens in {r.seconds:.1f} s"
    return f"{numbers}  {r.checkpoint}"


if __name__ == "__main__":
    status = status_of_command(main)
    if world_from_env()[2] > 1:  # gloo's threads may abort while Python shuts down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
