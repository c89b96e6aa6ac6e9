# shellcheck shell=bash
# What islands_local.sh and islands_ssh.sh share: islands as children of one script, which starts them again. Sourced,
# not run. Each island is a launch script of its own with its own run folder, island-1, island-2, ...

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folder=""   # absolute; the islands' run folders are below it
islands=()  # number of an island -> process id of its script
deaths=()   # number of an island -> how often in a row it died soon after its start
started=()  # number of an island -> when it was started last, in seconds of this script
LIVED_S=600 # the deaths of an island before it lived for this time no longer count

on_signal() { # NAME: each island's script answers it: the first signal saves and stops, a second one kills at once
    asked=$1
    for pid in "${islands[@]}"; do kill -s "$1" "$pid" 2>/dev/null || true; done
}

has_override() { # KEY OVERRIDES...: whether KEY is given
    local key=$1 override
    shift
    for override in "$@"; do
        case $override in "$key"=*) return 0 ;; esac
    done
    return 1
}

launch_island() { # NUMBER OVERRIDES...: runs `island_command NUMBER OVERRIDES...`, each line with the island's name
    local number=$1 name=island-$1
    shift
    set -m # in a process group of its own, which a terminal's Ctrl-C does not reach
    island_command "$number" "$@" "run.dir=$folder/$name" \
        > >(trap '' INT TERM HUP USR1 && exec sed -u "s/^/$name: /") \
        2> >(trap '' INT TERM HUP USR1 && exec sed -u "s/^/$name: /" >&2) &
    islands[number]=$!
    set +m
    started[number]=$SECONDS
}

may_return() { # NUMBER CODE: whether an island that has ended with this code is started again
    [ -z "$asked" ] || return 1
    [ "$2" = 75 ] || [ "$2" -gt 128 ] || return 1 # others would be repeated: docs/launch.md
    if [ $((SECONDS - started[$1])) -ge "$LIVED_S" ]; then deaths[$1]=0; fi
    deaths[$1]=$((${deaths[$1]:-0} + 1))
    [ "${deaths[$1]}" -le "${MAX_RESTARTS:-3}" ]
}

run_islands() { # COUNT OVERRIDES...: runs islands 1 to COUNT until all have ended. Sets `status` to the first failure's
    local count=$1 number code
    shift
    for ((number = 1; number <= count; number++)); do launch_island "$number" "$@"; done
    while [ "${#islands[@]}" -gt 0 ]; do
        sleep 0.5 || true # a signal ends it
        for number in "${!islands[@]}"; do
            kill -0 "${islands[number]}" 2>/dev/null && continue
            code=0
            wait "${islands[number]}" || code=$?
            unset "islands[number]"
            if may_return "$number" "$code"; then
                echo "island-$number ended with status $code: it is started again" >&2
                launch_island "$number" "$@" resume=auto
                continue
            fi
            echo "island-$number ended with status $code" >&2
            if [ "$status" = 0 ] || [ "$status" = 85 ]; then status=$code; fi
        done
    done
}
