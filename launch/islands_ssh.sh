#!/usr/bin/env bash
# Trains one model with several islands, each on hosts of its own that ssh reaches without a password (docs/islands.md).
#
#   launch/islands_ssh.sh node0 node1 -- recipe=llama_small mesh.fsdp=8
#   NPROC=8 launch/islands_ssh.sh node0,node1 node2,node3 -- recipe=llama3_8b mesh.fsdp=16
#
# Each argument before -- is an island: a host, or several with commas between them. Every argument after -- is an
# override that all islands have. This repository, the Python environment and run.dir must have the same paths on all
# hosts, on shared storage. The islands have the run folders <run.dir>/island-1, <run.dir>/island-2, ... An island that
# dies is started again with resume=auto.
#   ISLANDS_PORT  the first island listens at this port of its first host, the next ones at the following ports of
#                 theirs (default 29600)
#   PORT          port of the first island's rendezvous; the next ones have the following ports (default 29400)
#   MAX_RESTARTS  maximum number of restarts of an island in a row, each after less than ten minutes (default 3)
#   NPROC, PRELUDE, VENV, CONTAINER, INTERFACE, RESTARTS, MIN_HOSTS, SSH  as in launch/multihost.sh, for each island
#   NDTRAIN_ISLANDS_TOKEN  the secret that all islands share (default: a new one)
# Ctrl-C, SIGTERM and SIGUSR1 stop all islands after a step, with checkpoints. Exit codes: docs/launch.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/islands.sh
source "$here/islands.sh"

if help_asked "$@"; then
    show_help "$0"
    exit
fi
entries=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    entries+=("$1")
    shift
done
if [ "${#entries[@]}" = 0 ] || [ $# = 0 ]; then
    echo "error: usage: launch/islands_ssh.sh HOST[,HOST...]... -- OVERRIDE..." >&2
    exit 2
fi
shift
KNOWN=4 # addresses at which a returning island looks for the others

known_addresses() { # prints islands.address for the first islands
    local list=() number
    for ((number = 0; number < ${#entries[@]} && number < KNOWN; number++)); do
        list+=("${entries[number]%%,*}:$((${ISLANDS_PORT:-29600} + number))")
    done
    (IFS=, && echo "islands.address=[${list[*]}]")
}

# shellcheck disable=SC2329 # called by launch_island
island_command() { # NUMBER OVERRIDES...
    local number=$1 hosts=()
    shift
    IFS=, read -ra hosts <<<"${entries[number - 1]}"
    exec env "PORT=$((${PORT:-29400} + number - 1))" "$here/multihost.sh" "${hosts[@]}" -- "$@"
}

enter_environment
folder=$(folder_of "$@") || exit
NDTRAIN_ISLANDS_TOKEN=${NDTRAIN_ISLANDS_TOKEN:-$(random_token)}
export NDTRAIN_ISLANDS_TOKEN
if ! has_override islands.address "$@"; then set -- "$@" "$(known_addresses)"; fi
if ! has_override islands.count "$@"; then set -- "$@" "islands.count=${#entries[@]}"; fi
run_islands "${#entries[@]}" "$@"
exit "$status"
