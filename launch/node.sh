#!/usr/bin/env bash
# One host's part of a run on several: its torchrun. Started by train.sbatch and multihost.sh, not by hand.
#
# Every rank writes what it prints into <run.dir>/logs/rank-N.out. Rank 0's is shown as well, and of the first rank of
# every host what it says on standard error. In the environment:
#   NODE, NODES      number of this host (0 has the rendezvous); how many there are, or MIN:MAX
#   ENDPOINT, RUN_ID HOST:PORT of the rendezvous; a name for it that no other run has
#   LOGS, RANKS      the logs' folder; ranks on this host
#   PRELUDE, VENV, CONTAINER...  as launch/environment.sh has them
#   LAUNCH           the start of the script that started this one
#   RESTARTS         how often torchrun starts the ranks again after one has died
#   NDTRAIN_TOKEN    the secret that the ranks of all hosts share
#   WHILE_CONNECTED  if set, that secret is the first line of standard input, and the ranks end at once where that ends
set -euo pipefail

if [ -n "${WHILE_CONNECTED:-}" ] && ! read -r NDTRAIN_TOKEN; then
    echo "error: standard input has ended: the remote shell, or what it starts, does not pass it on" >&2
    exit 2
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
log=$0/rank-$RANK.out
if [ ! -w "$0" ]; then : # training says so
elif [ "$RANK" = 0 ]; then exec > >(exec tee -a "$log") 2>&1
elif [ "$LOCAL_RANK" = 0 ]; then exec >>"$log" 2> >(exec tee -a "$log" >&2)
else exec >>"$log" 2>&1; fi
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
