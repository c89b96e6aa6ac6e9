#!/usr/bin/env bash
# Trains on several hosts that a cluster manager starts: this is the command of each of them (Kubernetes, SkyPilot).
#
#   NODE=0 NODES=2 ENDPOINT=node0:29400 RUN_ID=job7 NDTRAIN_TOKEN=... launch/pod.sh recipe=llama3_8b mesh.fsdp=8 mesh.dp=-1
#
# Manifests that start it are in launch/kubernetes and launch/skypilot.yaml (docs/launch.md). run.dir must be on storage
# that all hosts share. A host that is started again resumes, unless the overrides have a `resume`.
#   NODE           index of this host (default: JOB_COMPLETION_INDEX, which Kubernetes sets)
#   NODES          number of hosts
#   ENDPOINT       HOST:PORT of the rendezvous on host 0
#   RUN_ID         name of the job, the same on all hosts
#   ATTEMPT        how often all hosts were started again, the same on all hosts (default 0)
#   NDTRAIN_TOKEN  a secret that the hosts share: a long random text
#   NPROC          ranks on this host (default: its GPUs, else its CPUs)
#   RESTARTS       maximum number of restarts by torchrun after a rank has died (default 0)
#   PRELUDE, VENV, INTERFACE   as the other scripts have them
# SIGTERM stops the run after a step, with a checkpoint. Exit codes: docs/launch.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
given_token=${NDTRAIN_TOKEN:-}
# shellcheck source=launch/common.sh
source "$here/common.sh"

if help_asked "$@"; then
    show_help "$0"
    exit
fi
NODE=${NODE:-${JOB_COMPLETION_INDEX:-}}
for name in NODE NODES ENDPOINT RUN_ID; do
    [ -n "${!name:-}" ] || refuse "$name is not set: launch/pod.sh --help lists what a host needs"
done
[ -n "$given_token" ] || refuse "NDTRAIN_TOKEN is not set: all hosts need the same long random text"
NDTRAIN_LAUNCH=$RUN_ID-${ATTEMPT:-0} # one start, on all hosts

# shellcheck disable=SC2329 # called by supervise
host() { # OVERRIDES...: this host's torchrun
    exec bash "$here/node.sh" "$@"
}

enter_environment
prepare "$@"
case " $*" in
    *" resume="*) ;;
    *) set -- "$@" resume=auto ;;
esac
export NODE NODES ENDPOINT RUN_ID=$NDTRAIN_LAUNCH LOGS=$run_dir/logs LAUNCH=$NDTRAIN_LAUNCH RANKS=${NPROC:-} RESTARTS=${RESTARTS:-0}
supervise host "$@"
outcome
exit "$status"
