"""`python -m ndtrain.bench peers axis=one|dp|fsdp [key=value ...]`"""

import sys

from ndtrain.bench import peers
from ndtrain.bench.arguments import one_of, parse
from ndtrain.bench.ranks import RankFailed
from ndtrain.config import ConfigError

BENCHES = {"peers": (peers.Options, peers.run)}


def main(args: list[str]) -> int:
    """Runs the bench that `args` name; the exit status: 2 for bad arguments (one line says why), 1 for a failure."""
    try:
        options_of, run = BENCHES[one_of("bench", args[0] if args else "", list(BENCHES))]
        run(parse(options_of, args[1:]))
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
