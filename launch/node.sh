#!/usr/bin/env bash
# Runs torchrun on one host of a run on several hosts. Started by train.sbatch and multihost.sh, not by hand.
#
# The ranks of a host write their output to <run.dir>/logs/rank-N.out, where N is the first of them. Each line begins
# with its rank. The console also shows the output of rank 0, and the standard error of the first rank of every host.
# Environment variables:
#   NODE, NODES      index of this host (0 runs the rendezvous); number of hosts, or MIN:MAX
#   ENDPOINT, RUN_ID HOST:PORT of the rendezvous; its unique name
#   LOGS, RANKS      the logs' folder; ranks on this host
#   PRELUDE, VENV, CONTAINER...  as launch/environment.sh has them
#   LAUNCH           id of this start, from the calling script
#   RESTARTS         maximum number of restarts by torchrun after a rank has died
#   NDTRAIN_TOKEN    the secret that the ranks of all hosts share
#   WHILE_CONNECTED  if set, the first line of standard input is that secret, the second one NDTRAIN_ISLANDS_TOKEN, and
#                    the ranks end when it closes
set -euo pipefail

if [ -n "${WHILE_CONNECTED:-}" ]; then
    if ! { read -r NDTRAIN_TOKEN && read -r NDTRAIN_ISLANDS_TOKEN; }; then
        echo "error: standard input is closed: the remote shell has to forward it" >&2
        exit 2
    fi
    if [ -n "$NDTRAIN_ISLANDS_TOKEN" ]; then export NDTRAIN_ISLANDS_TOKEN; fi
fi
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap - INT TERM HUP USR1
if help_asked "$@"; then
    show_help "$0"
    exit
fi
export NDTRAIN_LAUNCH=$LAUNCH # not this host's part
run_dir=${LOGS%/logs}
if [ "${CONTAINER_RUNTIME:-}" = pyxis ]; then unset CONTAINER; fi # this script runs inside already
enter_environment

# with its default torchrun keeps the address of the first round's rank 0, and hosts that come back, or the loss of that
# one among three, find nobody there
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
[ "$NODE" = 0 ] && host=true || host=false # said, not guessed: torchrun compares ENDPOINT with this host's own name
# shellcheck disable=SC2016 # the rank's own variables
rank='
log=$0/rank-$((RANK - LOCAL_RANK)).out
ends_with_rank() { trap "" HUP INT TERM && exec "$@"; } # torchrun sends signals to all processes of a rank
lines() { ends_with_rank sed -u "s/^/$RANK: /" >>"$log"; }
if [ ! -w "$0" ]; then : # training says so
elif [ "$RANK" = 0 ]; then exec > >(ends_with_rank tee >(lines)) 2>&1
elif [ "$LOCAL_RANK" = 0 ]; then exec > >(lines) 2> >(ends_with_rank tee >(lines) >&2)
else exec > >(lines) 2>&1; fi
exec python -u -m ndtrain.train "$@"'
contained \
    python -m ndtrain.run.torchrun --nnodes="$NODES" --nproc-per-node="${RANKS:-$(ranks_here)}" --max-restarts="${RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="$ENDPOINT" --rdzv-id="$RUN_ID" --rdzv-conf="is_host=$host" \
    --no-python bash --norc -c "$rank" "$LOGS" "$@"
if [ -z "${WHILE_CONNECTED:-}" ]; then
    exec "${command[@]}"
fi

trap end_now HUP TERM
exec 3<&0
"${command[@]}" </dev/null 3<&- &
child=$!
(read -r _ <&3 || true; end_now) >/dev/null 2>&1 & # nothing is ever sent: a read returns when the other end is closed
watch=$!
wait "$child" || status=$?
kill "$watch" 2>/dev/null || true
exit "$status"
