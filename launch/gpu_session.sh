#!/usr/bin/env bash
# On a bare machine with a GPU and PyTorch, from the root of a copy of this repository: installs the missing packages
# from the wheels of launch/gpu_prepare.sh, without an index, runs the tests that need a GPU, then `bench gpu`, most
# important cases first, all within MINUTES. The results of each case are written to FOLDER at once.
#
#   launch/gpu_session.sh FOLDER                                    # the first command
#   launch/gpu_session.sh FOLDER resume=BROUGHT/gpu-h200.json       # the next ones: missing cases
#   launch/gpu_session.sh FOLDER suite=smoke device=cpu             # the same without a GPU
#
# The arguments after FOLDER are options of `python -m ndtrain.bench gpu`.
#   MINUTES  total time (default 9, because a command may take ten)
#   TESTS    minutes of it for the tests (default 3, or 0 with resume=)
#   WHEELS   the folder of launch/gpu_prepare.sh (default .gpu_wheels)
#   CACHE    compiled code that an earlier command left in its FOLDER (default: next to the resume= file)
#   PYTHON   the Python that has PyTorch (default python3)
# FOLDER has gpu-<suite>.json and .md (the figures, and ahead or behind for each goal), tests.log, bench.log and
# compiled.tar.gz. Exit status: 1 if a test or the bench failed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${1:-} in
    -h | --help)
        # shellcheck source=launch/common.sh
        source "$here/common.sh"
        show_help "$0"
        exit
        ;;
    "" | *=*)
        echo "error: usage: launch/gpu_session.sh FOLDER [OPTION...]" >&2
        exit 2
        ;;
esac
folder=$1
shift
end=$((60 * ${MINUTES:-9})) # SECONDS counts from this script's start
wheels=${WHEELS:-.gpu_wheels}
python=${PYTHON:-python3}
resume=""
for option in "$@"; do
    case $option in resume=*) resume=${option#resume=} ;; esac
done
tests=${TESTS:-3}
if [ -n "$resume" ]; then tests=${TESTS:-0}; fi
MOST_BYTES=$((16 << 20)) # of compiled.tar.gz
failed=0
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

install_missing() { # into $work/site: what is there already, PyTorch's own numpy above all, stays as it is
    local missing
    readarray -t missing < <("$python" - "$wheels" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    try:
        distribution(wheel.name.split("-")[0].replace("_", "-"))
    except PackageNotFoundError:
        print(wheel)
PYTHON
    )
    export PYTHONPATH=$work/site:$PWD
    [ "${#missing[@]}" -gt 0 ] || return 0
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "${missing[@]}"
    echo "installed from $wheels: ${#missing[@]} packages"
}

gpu_tests() { # the files that have them, so that no other needs to be importable here; tests/gpu decides most
    find tests/gpu -name 'test_*.py' | sort
    grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v '^tests/gpu/' | sort
}

unpack_compiled() {
    local from=${CACHE:-}
    if [ -z "$from" ] && [ -n "$resume" ]; then from=$(dirname "$resume")/compiled.tar.gz; fi
    export TORCHINDUCTOR_CACHE_DIR=$work/compiled
    mkdir -p "$TORCHINDUCTOR_CACHE_DIR"
    if [ -n "$from" ] && [ -f "$from" ]; then tar -xzf "$from" -C "$TORCHINDUCTOR_CACHE_DIR"; fi
}

pack_compiled() { # where it is small enough to come back
    tar -czf "$work/compiled.tar.gz" -C "$TORCHINDUCTOR_CACHE_DIR" . 2>/dev/null || return 0
    if [ "$(wc -c <"$work/compiled.tar.gz")" -le "$MOST_BYTES" ]; then cp "$work/compiled.tar.gz" "$folder"; fi
}

install_missing
if [ -f "$wheels/commit" ]; then
    NDTRAIN_COMMIT=$(cat "$wheels/commit") # a copy of a working tree need not have a .git
    export NDTRAIN_COMMIT
fi
unpack_compiled
if [ "$tests" -gt 0 ]; then
    readarray -t files < <(gpu_tests)
    # SIGINT, so that pytest says what it has by then
    timeout --signal=INT --kill-after=20 $((60 * tests)) "$python" -m pytest -m gpu -rs --durations=15 "${files[@]}" 2>&1 |
        tee "$folder/tests.log" || failed=1
fi
left=$(((end - SECONDS) / 60))
if [ "$left" -gt 0 ]; then
    "$python" -m ndtrain.bench gpu "folder=$folder" "minutes=$left" "$@" 2>&1 | tee "$folder/bench.log" || failed=1
else
    echo "no time is left for the bench: raise MINUTES=${MINUTES:-9}, or lower TESTS" >&2
    failed=1
fi
pack_compiled
exit "$failed"
