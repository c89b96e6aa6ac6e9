"""`python -m ndtrain.bench <bench> [key=value ...]`, where the bench is

peers axis=one|dp|fsdp|tp|cp|pp
step recipe=llama_small [cases="OVERRIDES | OVERRIDES" profile=true]
gpu [suite=h200|h100|smoke]
collectives [mesh="dp=2 tp=2" max=1GiB plot=FILE.png | demo=true], also under torchrun
matmul [max=4096 plot=FILE.png]
checkpoint [ranks=4 gigabytes=1]
"""

import sys
import time
from collections.abc import Sequence
from types import ModuleType

from ndtrain.bench import attention, checkpoint, collectives, gpu, matmul, peers, step
from ndtrain.bench.arguments import one_of, parse
from ndtrain.bench.ranks import RankFailed, WrongResult, leave
from ndtrain.config import ConfigError, world_from_env


def peers_of(args: Sequence[str]) -> ModuleType:
    """axis=cp compares attention alone, the others whole steps; their keys differ."""
    return attention if "axis=cp" in args else peers


BENCHES = {
    "peers": peers_of,
    "checkpoint": lambda args: checkpoint,
    "collectives": lambda args: collectives,
    "matmul": lambda args: matmul,
    "step": lambda args: step,
    "gpu": lambda args: gpu,
}


def main(args: list[str]) -> int:
    """Runs the bench that `args` name; the exit status: 2 for bad arguments (one line says why), 1 for a failure."""
    try:
        bench = BENCHES[one_of("bench", args[0] if args else "", list(BENCHES))](args[1:])
        bench.run(parse(bench.Options, args[1:]))
        return 0
    except ConfigError as error:
        if world_from_env()[0] > 0:  # rank 0 says it, unless torchrun ends it because this one has left
            time.sleep(1)
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except (RankFailed, WrongResult) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
