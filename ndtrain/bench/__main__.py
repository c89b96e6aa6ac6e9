"""`python -m ndtrain.bench peers axis=one|dp|fsdp|tp|cp|pp [key=value ...]`,
`python -m ndtrain.bench checkpoint [ranks=4 gigabytes=1 key=value ...]`,
`python -m ndtrain.bench step recipe=llama_small [cases="OVERRIDES | OVERRIDES" key=value ...]` and
`python -m ndtrain.bench gpu [suite=h200 key=value ...]`"""

import sys
from collections.abc import Sequence
from types import ModuleType

from ndtrain.bench import attention, checkpoint, gpu, peers, step
from ndtrain.bench.arguments import one_of, parse
from ndtrain.bench.ranks import RankFailed
from ndtrain.config import ConfigError


def peers_of(args: Sequence[str]) -> ModuleType:
    """axis=cp compares attention alone, the others whole steps; their keys differ."""
    return attention if "axis=cp" in args else peers


BENCHES = {
    "peers": peers_of,
    "checkpoint": lambda args: checkpoint,
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
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
