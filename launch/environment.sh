# shellcheck shell=bash
# The environment that the launch scripts give a run on each host. Sourced, not run.
#
#   PRELUDE            a file to source: modules, conda, variables of NCCL
#   VENV               a virtual environment to activate
#   CONTAINER          an image that every Python process runs in
#   CONTAINER_RUNTIME  pyxis, apptainer or singularity (default: the first one installed)
#   CONTAINER_MOUNTS   further paths for the container: PATH or HOST_PATH:CONTAINER_PATH, with commas between them

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=() # set by `contained`

refuse() { # MESSAGE
    echo "error: $1" >&2
    exit 2
}

absolute() { # PATH
    case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}

enter_environment() { # before the first Python process
    if [ -n "${PRELUDE:-}" ]; then
        PRELUDE=$(absolute "$PRELUDE") # else `source` looks for it on PATH
        export PRELUDE
        [ -r "$PRELUDE" ] || refuse "PRELUDE=$PRELUDE: $(uname -n) has no such file"
        set +eu # `module` and `conda` use unset variables
        # shellcheck disable=SC1090
        source "$PRELUDE"
        set -eu
    fi
    if [ -n "${VENV:-}" ]; then
        VENV=$(absolute "$VENV")
        export VENV
    fi
    if [ -n "${CONTAINER:-}" ]; then
        choose_container # `contained` activates VENV inside
    elif [ -n "${VENV:-}" ]; then
        [ -r "$VENV/bin/activate" ] || refuse "VENV=$VENV: $(uname -n) has no $VENV/bin/activate"
        # shellcheck disable=SC1091
        source "$VENV/bin/activate"
    fi
}

# ------------------------------------------------------------------------------------------------------- the container

choose_container() { # sets CONTAINER_RUNTIME
    if [ -e "$CONTAINER" ]; then CONTAINER=$(absolute "$CONTAINER"); fi # else it is a name in a registry
    CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-$(found_runtime)}
    export CONTAINER CONTAINER_RUNTIME
    case $CONTAINER_RUNTIME in
        pyxis) has_pyxis || refuse "CONTAINER_RUNTIME=pyxis: it needs a Slurm job whose srun has --container-image" ;;
        apptainer | singularity)
            has_program "$CONTAINER_RUNTIME" ||
                refuse "CONTAINER_RUNTIME=$CONTAINER_RUNTIME: $(uname -n) has no program of this name"
            ;;
        "") refuse "CONTAINER=$CONTAINER: $(uname -n) has neither pyxis (in a Slurm job) nor apptainer nor singularity" ;;
        *) refuse "CONTAINER_RUNTIME=$CONTAINER_RUNTIME: choose pyxis, apptainer or singularity" ;;
    esac
}

found_runtime() { # prints the first one that is there; nothing if there is none
    local name
    if has_pyxis; then
        echo pyxis
        return
    fi
    for name in apptainer singularity; do
        if has_program "$name"; then
            echo "$name"
            return
        fi
    done
}

has_program() { # NAME
    command -v "$1" >/dev/null
}

has_pyxis() { # it starts the tasks of a Slurm job
    [ -n "${SLURM_JOB_ID:-}" ] && [[ $(srun --help 2>&1) == *--container-image* ]]
}

mounts() { # prints what the container sees of the host, HOST_PATH:CONTAINER_PATH in each line
    local path more=()
    # shellcheck disable=SC2154 # run_dir is set in common.sh
    for path in "$PWD" "$repository" "$run_dir" "${VENV:-}"; do
        if [ -d "$path" ]; then echo "$path:$path"; fi
    done
    IFS=, read -ra more <<<"${CONTAINER_MOUNTS:-}"
    for path in "${more[@]}"; do
        case $path in *:*) echo "$path" ;; *) echo "$path:$path" ;; esac
    done
}

uses_pyxis() {
    [ "${CONTAINER:+$CONTAINER_RUNTIME}" = pyxis ]
}

pyxis_options() { # sets `options` to those of srun
    local list
    list=$(mounts | paste -s -d ,)
    options=(--container-image="$CONTAINER" --container-mounts="$list" --container-workdir="$PWD")
}

contained() { # COMMAND...: sets `command` to what runs COMMAND in the container; to COMMAND if there is no container
    local path options=()
    command=("$@")
    [ -n "${CONTAINER:-}" ] || return 0
    # shellcheck disable=SC2016 # variables of the shell in the container
    if [ -n "${VENV:-}" ]; then command=(bash -c '. "$0/bin/activate" && exec "$@"' "$VENV" "$@"); fi
    if uses_pyxis; then # a job step of its own, on one node
        pyxis_options
        command=(srun --nodes=1 --ntasks=1 --input=none "${options[@]}" "${command[@]}")
        return
    fi
    if has_program nvidia-smi; then options+=(--nv); fi
    while IFS= read -r path; do options+=(--bind "$path"); done < <(mounts)
    command=("$CONTAINER_RUNTIME" exec "${options[@]}" "$CONTAINER" "${command[@]}")
}
