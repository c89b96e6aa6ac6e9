#!/usr/bin/env bash
# Trains on this machine with one rank per GPU, or per CPU core where there is no GPU.
#
#   launch/local.sh recipe=llama_small mesh.fsdp=-1
#   NPROC=4 launch/local.sh recipe=llama_small mesh.dp=2 mesh.fsdp=2
#
# Every argument is an override of the configuration. NPROC sets the number of ranks.
set -euo pipefail

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
if [ "$gpus" -gt 0 ]; then ranks=$gpus; else ranks=$(nproc); fi

exec torchrun --standalone --nproc-per-node "${NPROC:-$ranks}" -m ndtrain.train "$@"
