#!/usr/bin/env bash
# Trains on several hosts that ssh reaches without a password, with one rank per GPU (or CPU core) of each.
#
#   launch/multihost.sh node0 node1 -- recipe=llama3_8b mesh.fsdp=8 mesh.dp=-1
#   NPROC=4 VENV=/shared/venv MIN_HOSTS=1 RESTARTS=3 launch/multihost.sh node0 node1 -- recipe=llama_small mesh.fsdp=-1
#
# This repository, the Python environment and run.dir must have the same paths on all hosts, on shared storage. The
# first host runs the rendezvous. The arguments after -- are overrides of the configuration.
#   NPROC      ranks per host
#   PRELUDE    a file that every host sources first: modules, conda, variables of NCCL
#   VENV       a virtual environment to activate on every host
#   CONTAINER  an image that Python runs in on every host, with CONTAINER_RUNTIME and CONTAINER_MOUNTS (docs/launch.md)
#   PORT       port of the rendezvous on the first host (default 29400)
#   INTERFACE  the network interface to listen on, e.g. eth0
#   RESTARTS   maximum number of restarts by torchrun after a rank has died (default 0)
#   MIN_HOSTS  minimum number of hosts to continue with after a restart (default: all)
#   SSH        another remote shell, called as `$SSH HOST COMMAND`; it has to forward standard input
# Variables NCCL_*, GLOO_*, OMP_*, TORCH_*, CUDA_*, HYDRA_*, NDTRAIN_* and WANDB_MODE are passed to the
# hosts: the secrets NDTRAIN_TOKEN and NDTRAIN_ISLANDS_TOKEN on standard input, the others on the command line.
# Ctrl-C, SIGTERM and SIGUSR1 stop the run after a step, with a checkpoint. Exit codes: docs/launch.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$here/common.sh"

if help_asked "$@"; then
    show_help "$0"
    exit
fi
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ "${#hosts[@]}" = 0 ] || [ $# = 0 ]; then
    echo "error: usage: launch/multihost.sh HOST... -- OVERRIDE..." >&2
    exit 2
fi
shift
enter_environment
least=${MIN_HOSTS:-${#hosts[@]}}
read -ra remote_shell <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}"
GRACE=10 # seconds that the other hosts have to say their part when one has failed

# shellcheck disable=SC2329 # called by fan_out
remote_command() { # NODE OVERRIDES...: what a host is to run, in one line
    local node=$1 variables=() name
    shift
    for name in $(compgen -e | grep -E '^((NCCL|GLOO|OMP|TORCH|CUDA|HYDRA|NDTRAIN|CONTAINER)_|(WANDB_MODE|PRELUDE|VENV|CONTAINER)$)'); do
        case $name in NDTRAIN_TOKEN | NDTRAIN_ISLANDS_TOKEN) continue ;; esac # `ps` shows command lines to everyone
        variables+=("$name=${!name}")
    done
    variables+=(
        "NODE=$node" "NODES=$least:${#hosts[@]}" "ENDPOINT=${hosts[0]}:${PORT:-29400}" "RUN_ID=$run_id"
        "LOGS=$run_dir/logs" "LAUNCH=$NDTRAIN_LAUNCH" "RANKS=${NPROC:-}" "RESTARTS=${RESTARTS:-0}" WHILE_CONNECTED=1
    )
    printf 'cd %q && exec env' "$PWD"
    printf ' %q' "${variables[@]}" bash "$here/node.sh" "$@"
}

# shellcheck disable=SC2329 # called by supervise
fan_out() { # OVERRIDES...: a torchrun on every host; ends all when fewer are left than are needed
    local pids=() pipe failed=0 code result=0 deadline="" i
    # every host's standard input is one pipe: where its other end is closed, be it by this process's death, they end
    pipe=$(mktemp -u) && mkfifo "$pipe"
    exec 8<>"$pipe" # else the next line would wait for a writer
    exec 7<"$pipe"
    exec 9>"$pipe" 8>&-
    rm "$pipe"
    for i in "${!hosts[@]}"; do
        # and no pipeline: `wait` would wait for all of it
        "${remote_shell[@]}" "${hosts[i]}" "$(remote_command "$i" "$@")" \
            < <(exec 9>&- && printf '%s\n' "$NDTRAIN_TOKEN" "${NDTRAIN_ISLANDS_TOKEN:-}" && exec cat <&7) 7<&- 9>&- &
        pids+=($!)
    done
    while [ "${#pids[@]}" -gt 0 ]; do
        sleep 0.5 9>&-
        for i in "${!pids[@]}"; do
            kill -0 "${pids[i]}" 2>/dev/null && continue
            code=0
            wait "${pids[i]}" || code=$?
            unset "pids[i]"
            [ "$code" != 0 ] || continue
            echo "${hosts[i]}: ended with status $code" >&2
            failed=$((failed + 1))
            if [ $((${#hosts[@]} - failed)) -lt "$least" ]; then
                if [ "$result" = 0 ]; then result=$code; fi
                deadline=${deadline:-$((SECONDS + GRACE))}
            fi
        done
        kill -0 $$ 2>/dev/null || deadline=0 # the script is gone, and nobody would see how this ends
        if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then exec 9>&-; fi
    done
    return "$result"
}

# shellcheck disable=SC2329 # called upon a second signal
end_now() { # by the end of the pipe
    [ -z "$child" ] || kill -KILL "$child" 2>/dev/null || true
}

prepare "$@"
run_id=$(uname -n)-$$-$(date +%s)
supervise fan_out "$@"
outcome
exit "$status"
