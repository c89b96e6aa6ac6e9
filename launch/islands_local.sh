#!/usr/bin/env bash
# Trains one model with several islands on this machine (docs/islands.md).
#
#   launch/islands_local.sh 2 recipe=llama_small train.steps=1000
#   NPROC=2 launch/islands_local.sh 2 recipe=llama_small mesh.fsdp=2
#
# The first argument is the number of islands, every other one an override that all islands have. The islands have the
# run folders <run.dir>/island-1, <run.dir>/island-2, ... An island that dies is started again with resume=auto.
#   NPROC         ranks per island (default: the GPUs, or CPU cores if there are none, divided by the islands)
#   MAX_RESTARTS  maximum number of restarts of an island in a row, each after less than ten minutes (default 3)
#   RESTARTS, OMP_NUM_THREADS, PRELUDE, VENV, CONTAINER  as in launch/local.sh
# Ctrl-C, SIGTERM and SIGUSR1 stop all islands after a step, with checkpoints. Exit codes: docs/launch.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/islands.sh
source "$here/islands.sh"

if help_asked "$@"; then
    show_help "$0"
    exit
fi
count=${1:-}
if ! [[ $count =~ ^[1-9][0-9]*$ ]]; then
    echo "error: usage: launch/islands_local.sh NUMBER OVERRIDE..." >&2
    exit 2
fi
shift

# shellcheck disable=SC2329 # called by launch_island
island_command() { # NUMBER OVERRIDES...
    local first=$((($1 - 1) * ranks)) variables=("NPROC=$ranks")
    shift
    if [ "$gpus" -ge $((count * ranks)) ] && [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
        variables+=("CUDA_VISIBLE_DEVICES=$(seq -s , "$first" $((first + ranks - 1)))")
    elif [ "$gpus" = 0 ] && [ -z "${OMP_NUM_THREADS:-}" ]; then
        variables+=("OMP_NUM_THREADS=$((cores > count * ranks ? cores / (count * ranks) : 1))")
    fi
    exec env "${variables[@]}" "$here/local.sh" "$@"
}

enter_environment
folder=$(folder_of "$@") || exit
cores=$(ranks_here)
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
ranks=${NPROC:-$((cores > count ? cores / count : 1))}
# not the default port, at which islands of another run may listen
if ! has_override islands.address "$@"; then set -- "$@" "islands.address=127.0.0.1:$((30000 + $$ % 2000))"; fi
if ! has_override islands.count "$@"; then set -- "$@" "islands.count=$count"; fi
run_islands "$count" "$@"
exit "$status"
