#!/usr/bin/env bash
# Trains on this machine with one rank per GPU, or per CPU core where there is no GPU.
#
#   launch/local.sh recipe=llama_small mesh.fsdp=-1
#   NPROC=4 launch/local.sh recipe=llama_small mesh.dp=2 mesh.fsdp=2
#
# Every argument is an override of the configuration.
#   NPROC     the number of ranks
#   RESTARTS  how often torchrun starts the ranks again after one has died (default 0)
# Ctrl-C, SIGTERM and SIGUSR1 stop the run after a step, with a checkpoint. Exit codes: docs/launch.md.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare "$@"
supervise torchrun --standalone --nproc-per-node "${NPROC:-$(ranks_here)}" --max-restarts "${RESTARTS:-0}" \
    -m ndtrain.train "$@"
outcome
exit "$status"
