#!/usr/bin/env bash
# Trains on this machine with one rank per GPU, or per CPU core if there is no GPU.
#
#   launch/local.sh recipe=llama_small mesh.fsdp=-1
#   NPROC=4 launch/local.sh recipe=llama_small mesh.dp=2 mesh.fsdp=2
#
# Every argument is an override of the configuration.
#   NPROC     the number of ranks
#   RESTARTS  maximum number of restarts by torchrun after a rank has died (default 0)
#   OMP_NUM_THREADS  CPU threads per rank (default: the cores divided by the ranks)
#   PRELUDE   a file to source first: modules, conda
#   VENV      a virtual environment to activate
#   CONTAINER an image that Python runs in, with CONTAINER_RUNTIME and CONTAINER_MOUNTS (docs/launch.md)
# Ctrl-C, SIGTERM and SIGUSR1 stop the run after a step, with a checkpoint. Exit codes: docs/launch.md.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if help_asked "$@"; then
    show_help "$0"
    exit
fi
enter_environment
prepare "$@"
# torchrun, with the error of the rank that failed in one line
contained python -m ndtrain.run.torchrun --standalone --nproc-per-node "${NPROC:-$(ranks_here)}" --max-restarts "${RESTARTS:-0}" \
    -m ndtrain.train "$@"
supervise "${command[@]}"
outcome
exit "$status"
