# shellcheck shell=bash
# What the launch scripts share: the run folder, the signals, and what the end of a run means. Sourced, not run.
#
# A signal asks for a stop through the file <run.dir>/stop, which the ranks agree on after a step. torchrun, sent the
# same signal, would end the ranks itself, 30 seconds later at the latest, saved or not; so it is kept away from it.

# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run_dir=""  # absolute, from `prepare` on
made=""     # set if `prepare` has made that folder
child=""    # process id of what `supervise` runs
status=0    # its exit status
asked=""    # the signal that asked for a stop
asked_at="" # when the first signal other than SIGUSR1 came, in seconds of this script

# tells this start from all others: ranks write it into exit.json, and a stop file that names another start is not theirs
now=${EPOCHREALTIME:-$(date +%s)} # in seconds; of bash 5, with a fraction
NDTRAIN_LAUNCH=$(uname -n)-$$-${now/,/.}
export NDTRAIN_LAUNCH

random_token() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

# a secret that ranks sign their messages with, and the interface that they listen on: docs/launch.md
NDTRAIN_TOKEN=${NDTRAIN_TOKEN:-$(random_token)}
export NDTRAIN_TOKEN
if [ -n "${INTERFACE:-}" ]; then export NDTRAIN_INTERFACE=$INTERFACE; fi

on_signal() { # NAME
    if [ "$1" != USR1 ]; then
        # one request may come twice within a moment, from a terminal or a wrapper and from its parent
        if [ -n "$asked_at" ] && [ $((SECONDS - asked_at)) -ge 2 ]; then
            echo "second signal: the run is killed now, without saving" >&2
            end_now
            exit $((128 + $(kill -l "$1")))
        fi
        asked_at=${asked_at:-$SECONDS}
    fi
    if [ -z "$asked" ]; then
        asked=$1
        echo "SIG$1: the run stops after the current step; a second SIGINT or SIGTERM kills it at once" >&2 || true
    fi
    ask_to_stop
}

ask_to_stop() {
    if [ -n "$run_dir" ]; then (echo "$NDTRAIN_LAUNCH" >"$run_dir/stop") 2>/dev/null || true; fi
}

help_asked() { # ARGUMENTS...: whether --help is among them
    local argument
    for argument in "$@"; do
        case $argument in -h | --help) return 0 ;; --) return 1 ;; esac
    done
    return 1
}

show_help() { # FILE: prints the comment at the head of a script
    sed -n -e '1d' -e '/^#SBATCH/d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$1" | sed '/./,$!d'
}

for name in INT TERM HUP USR1; do
    # shellcheck disable=SC2064 # the name is meant to be that of now
    trap "on_signal $name" "$name"
done

prepare() { # OVERRIDES...: sets run_dir. It may belong to a live run: that run's files are not touched
    run_dir=$(folder_of "$@") || exit
    if [ ! -e "$run_dir" ]; then made=1; fi
    mkdir -p "$run_dir/logs" 2>/dev/null || true # training says why not
    if [ -n "$asked" ]; then ask_to_stop; fi # while the folder was being looked up
}

folder_of() { # OVERRIDES...: prints the run folder, absolute
    contained python -m ndtrain.run.launch_query folder "$@"
    (trap '' INT && exec "${command[@]}") # Ctrl-C is this script's to answer
}

supervise() { # COMMAND...: runs it to its end and sets `status`
    set -m # in a process group of its own, which a terminal's Ctrl-C does not reach
    "$@" &
    child=$!
    set +m
    while :; do
        status=0
        wait "$child" || status=$? # a signal of ours ends the waiting and not the command
        kill -0 "$child" 2>/dev/null || break
    done
}

end_now() { # ends what `supervise` runs; a script whose ranks are not torchrun's children here has its own
    end_torchrun "$child"
}

end_torchrun() { # PID: torchrun and its ranks, each of which leads a session of its own
    local found=("$@") children i
    [ -n "$1" ] || return 0
    for ((i = 0; i < ${#found[@]}; i++)); do # a container's program stands between this script and torchrun
        children=$(cat "/proc/${found[i]}/task/"*/children 2>/dev/null) || children=$(pgrep -P "${found[i]}") || true
        read -r -d '' -a children <<<"$children" || true
        found+=("${children[@]}")
    done
    kill -KILL "${found[@]}" 2>/dev/null || true
}

outcome() { # sets `status` to the documented exit code, and says why a run has failed: the last thing on the console
    contained python -m ndtrain.run.launch_query ended "$run_dir" "$status"
    supervise "${command[@]}"
    if [ "$status" = 2 ] && [ -n "$made" ]; then # a refused run leaves no folder, unless there is something in it
        rmdir "$run_dir/logs" 2>/dev/null || true
        rmdir "$run_dir" 2>/dev/null || true
    fi
}

ranks_here() { # a rank per GPU, or per CPU core where there is no GPU
    local gpus
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
    # nproc takes a limit of threads for the number of cores
    if [ "$gpus" -gt 0 ]; then echo "$gpus"; else env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; fi
}
