#!/usr/bin/env bash
# Collects the files that a bare machine with a GPU and PyTorch needs, on a machine with a package index: wheels of the
# versions and hashes in launch/gpu_wheels.txt, for Python 3.12 on x86-64 Linux, and the commit to measure.
#
#   launch/gpu_prepare.sh            # into .gpu_wheels, which git ignores; it travels with the working tree
#   launch/gpu_prepare.sh FOLDER
#   launch/gpu_prepare.sh --lock     # updates the hashes in launch/gpu_wheels.txt after a change of its versions
#
#   PYTHON    the Python whose pip downloads (default python3)
#   MOST_MIB  maximum size of the folder in MiB (default 64); larger folders are an error
# On the bare machine, launch/gpu_session.sh installs them without an index, tests and measures.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lock=$here/gpu_wheels.txt
python=${PYTHON:-python3}
platform=(--python-version 3.12 --implementation cp)
for glibc in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platform+=(--platform "${glibc}_x86_64"); done

download() { # REQUIREMENTS FOLDER: without their dependencies, which are requirements of their own
    "$python" -m pip download --quiet --no-deps "${platform[@]}" --dest "$2" --requirement "$1"
}

write_lock() { # keeps the comments, options and versions of the lock file
    local bare file
    bare=$work/versions.txt
    sed 's/ --hash=.*//' "$lock" >"$bare"
    download "$bare" "$work/all"
    while IFS= read -r line; do
        case $line in
            "" | "#"* | --*) echo "$line" ;;
            *)
                file=$(find "$work/all" -iname "$(sed 's/==/-/; s/[-_.]/[-_.]/g' <<<"$line")*") # names are spelled in several ways
                echo "$line --hash=sha256:$(sha256sum "$file" | cut -d ' ' -f 1)"
                ;;
        esac
    done <"$bare" >"$work/lock"
    cp "$work/lock" "$lock"
    echo "$lock: the hashes of $(grep -c -- --hash "$lock") packages"
}

case ${1:-} in
    -h | --help)
        # shellcheck source=launch/common.sh
        source "$here/common.sh"
        show_help "$0"
        exit
        ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ "${1:-}" = --lock ]; then
    write_lock
    exit
fi
folder=${1:-.gpu_wheels}
download "$lock" "$work/wheels"
for source in "$work"/wheels/*.tar.gz; do # a package of which there is no wheel
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$source"
    rm "$source"
done
mkdir -p "$folder"
rm -f "$folder"/*.whl
cp "$work"/wheels/*.whl "$folder"
git -C "$here" describe --always --dirty --abbrev=40 --exclude='*' >"$folder/commit" || rm -f "$folder/commit"
mib=$(du -sm "$folder" | cut -f 1)
echo "$folder: $(find "$folder" -name '*.whl' | wc -l) wheels, $mib MiB"
if [ "$mib" -gt "${MOST_MIB:-64}" ]; then
    echo "error: more than MOST_MIB=${MOST_MIB:-64}: remove the largest package from launch/gpu_wheels.txt" >&2
    exit 1
fi
