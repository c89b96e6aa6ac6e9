"""PRELUDE, VENV and CONTAINER of the launch scripts, with spaces in every path.

Python, ssh, apptainer and Slurm's programs are scripts here. The scripted Python prints the run folder and notes its
calls. Outside of the environment that a test gives there is no Python that works.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.test_launch import LONG, ROOT, SCRIPTS, START_S, script
from tests.lib.helpers import arguments, one_error, processes, rows, wait_for, write_corpus

FULL = pytest.mark.full
RUN = "a run"
PATH = "/usr/bin:/bin"  # of the system's programs
MOUNTS = "/usr/lib,/usr:/host usr"

PYTHON = """#!/usr/bin/env bash
for word in "$@"; do
    case $word in run.dir=*) run_dir=${word#run.dir=} ;; esac
done
case "$*" in *"launch_query folder"*) echo "$run_dir" ;; esac
call=$(printf '%q ' "image=${IMAGE-}" "sees=${SEES-}" "nccl=${NCCL_TEST-}" "$@")
echo "$call" >>"$CALLS" # at once: hosts write at one time
"""
NO_PYTHON = """#!/usr/bin/env bash
echo "this is the Python outside: $*" >&2
exit 97
"""
APPTAINER = """#!/usr/bin/env bash
[ "$1" = exec ] || exit 96
shift
SEES=""
while :; do
    case $1 in
        --nv) shift ;;
        --bind) SEES+="$2," && shift 2 ;;
        -*) exit 95 ;;
        *) break ;;
    esac
done
export SEES IMAGE=$1 PATH=$INSIDE
shift
"$@" # as apptainer does, this process stays between
"""
SRUN = """#!/usr/bin/env bash
if [ "$1" = --help ]; then
    for _ in {1..2000}; do echo "  --an-option"; done
    [ -z "${PYXIS-}" ] || echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"
    exit
fi
tasks=1
while :; do
    case $1 in
        --ntasks=*) tasks=${1#*=} ;;
        --container-image=*) export IMAGE=${1#*=} PATH=$INSIDE ;;
        --container-mounts=*) export SEES=${1#*=}, ;;
        --container-workdir=*) [ "${1#*=}" = "$PWD" ] || exit 94 ;;
        --nodes=* | --input=none | --kill-on-bad-exit=1 | --ntasks-per-node=1) ;;
        -*) exit 95 ;;
        *) break ;;
    esac
    shift
done
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" || exit; done
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show job") echo "   Command=$SUBMITTED recipe=llama_debug run.name=a name" ;;
    "show hostnames") echo n0 ;;
    "show node") echo "   NodeAddr=127.0.0.1 NodeHostName=n0" ;;
esac
"""
PRELUDE = """
echo "$a_variable_that_is_not_set" >/dev/null
export NCCL_TEST=prelude
export PATH="$PRELUDE_PATH:$PATH"
false
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class Call:
    """One call of Python: the image that it ran in, what that saw of the host, a variable, and the arguments."""

    image: str
    sees: list[str]
    nccl: str
    args: list[str]


class Place:
    """A repository, programs and environments, in a folder whose name has spaces."""

    def __init__(self, folder: Path):
        self.home = folder / "a home"
        self.repository = self.home / "a repository"
        shutil.copytree(SCRIPTS, self.repository / "launch")
        self.outside = self.home / "outside"
        self.inside = program(self.home / "in side" / "python", PYTHON).parent
        program(self.outside / "python", NO_PYTHON)
        program(self.home / "a venv" / "bin" / "python", PYTHON)
        (self.home / "a venv" / "bin" / "activate").write_text('PATH="${BASH_SOURCE[0]%/*}:$PATH"\n')
        (self.home / "a prelude").write_text(PRELUDE)
        self.image = self.home / "an image.sif"
        self.image.touch()
        self.calls_file = self.home / "calls"

    @property
    def env(self) -> dict[str, str]:
        passed_on = {"CALLS": str(self.calls_file), "INSIDE": f"{self.inside}:{PATH}", "PRELUDE_PATH": str(self.inside)}
        return {"PATH": f"{self.outside}:{PATH}", "HOME": str(self.home)} | passed_on

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess:
        overrides = [f"run.dir={self.home / RUN}", "recipe=llama_debug", "run.name=a name"]
        argv = ["bash", f"launch/{script}", *args, *overrides]
        given = self.env | {"NPROC": "1"} | env
        return subprocess.run(argv, cwd=self.repository, env=given, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[Call]:
        words = [shlex.split(line) for line in self.calls_file.read_text().splitlines()]
        value = lambda word: word.partition("=")[2]
        return [Call(value(w[0]), value(w[1]).split(",")[:-1], value(w[2]), w[3:]) for w in words]


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


# what a user gives -> the variables
GIVEN = {
    "VENV": lambda p: {"VENV": f"{p.home}/a venv"},
    "a relative VENV": lambda p: {"VENV": "../a venv"},
    "PRELUDE": lambda p: {"PRELUDE": f"{p.home}/a prelude"},
    "a relative PRELUDE": lambda p: {"PRELUDE": "../a prelude"},
    "CONTAINER": lambda p: {"CONTAINER": str(p.image)},
    "a relative CONTAINER": lambda p: {"CONTAINER": "../an image.sif"},
    "CONTAINER of a registry": lambda p: {"CONTAINER": "docker://image:1", "CONTAINER_MOUNTS": MOUNTS},
    "CONTAINER and VENV": lambda p: {"CONTAINER": str(p.image), "VENV": f"{p.home}/a venv", "INSIDE": PATH},
}  # fmt: skip


def local(place: Place, **env: str) -> int:
    """Runs local.sh. Returns the number of torchruns that there must be."""
    done = place.run("local.sh", **env)
    assert done.returncode == 0, done.stderr
    return 1


def multihost(place: Place, **env: str) -> int:
    """Two hosts, whose shells have none of this one's variables."""
    bare = {"INSIDE": env.get("INSIDE", place.env["INSIDE"])}
    variables = " ".join(shlex.quote(f"{key}={value}") for key, value in (place.env | bare).items())
    program(place.outside / "remote", f'#!/bin/bash\nexec env -i {variables} bash -c "$2"\n')
    done = place.run("multihost.sh", "n0", "n1", "--", SSH="remote", **env)
    assert done.returncode == 0, done.stderr
    return 2


def slurm(place: Place, *args: str, **env: str) -> int:
    """Two nodes of a job. Slurm runs a copy of the script."""
    script = place.repository / "launch" / "train.sbatch"
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        program(place.outside / name, text)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_SUBMIT_DIR": str(place.home),
    }
    done = place.run("train.sbatch", *args, SUBMITTED=str(script), **job, **env)
    assert done.returncode == 0, done.stderr
    return 2


def expected_image(place: Place, env: dict[str, str]) -> str:
    """The image that Python is to run in; "" for none. The path of a file is absolute."""
    given = env.get("CONTAINER", "")
    return str(place.repository / given) if given.endswith(".sif") else given


CASES = [(launch, given) for launch in (local, multihost, slurm) for given in GIVEN]
SAMPLED = ("PRELUDE", "CONTAINER and VENV")  # of each script that is not local.sh


@pytest.mark.parametrize(
    ("launch", "given"), [c if c[0] is local or c[1] in SAMPLED else pytest.param(*c, marks=FULL) for c in CASES]
)
def test_launch_scripts_run_every_python_in_given_environment(launch, given, place):
    program(place.outside / "apptainer", APPTAINER)
    env = GIVEN[given](place)
    torchruns = launch(place, **env)
    calls = place.calls()
    image = expected_image(place, env)
    assert {call.image for call in calls} == {image}
    assert {call.nccl for call in calls} == {"prelude" if "PRELUDE" in env else ""}
    query, *ranks, end = calls
    assert query.args[:3] == ["-m", "ndtrain.run.launch_query", "folder"] and "run.name=a name" in query.args
    assert end.args == ["-m", "ndtrain.run.launch_query", "ended", str(place.home / RUN), "0"]
    assert len(ranks) == torchruns and all(c.args[:2] == ["-m", "ndtrain.run.torchrun"] for c in ranks)
    assert all("run.name=a name" in call.args for call in ranks)
    if image:
        seen = {str(place.repository), str(place.home / RUN)} | {env[k] for k in ("VENV",) if k in env}
        assert all({f"{path}:{path}" for path in seen} <= set(call.sees) for call in (*ranks, end))
    if "CONTAINER_MOUNTS" in env:
        assert all({"/usr/lib:/usr/lib", "/usr:/host usr"} <= set(call.sees) for call in calls)


@pytest.mark.parametrize(
    "given", [g if g in SAMPLED else pytest.param(g, marks=FULL) for g in GIVEN if "CONTAINER" in g]
)
def test_every_python_runs_in_a_container_of_pyxis(given, place):
    """pyxis starts the nodes' tasks inside, and comes before apptainer."""
    program(place.outside / "apptainer", NO_PYTHON)
    env = GIVEN[given](place)
    assert slurm(place, PYXIS="1", **env) == 2
    calls = place.calls()
    assert [call.args[1] for call in calls] == [
        f"ndtrain.run.{n}" for n in ("launch_query", *["torchrun"] * 2, "launch_query")
    ]
    assert {call.image for call in calls} == {expected_image(place, env)}
    assert all(f"{place.home / RUN}:{place.home / RUN}" in call.sees for call in calls[1:])


REFUSED = {
    "no file of PRELUDE": ({"PRELUDE": "no such"}, "PRELUDE=.*/a repository/no such: .* has no such file"),
    "no VENV": ({"VENV": "no such"}, "VENV=.*/a repository/no such: .* has no .*/no such/bin/activate"),
    "no runtime": ({"CONTAINER": "image"}, "CONTAINER=image: .* has neither pyxis .* nor apptainer nor singularity"),
    "no such runtime": ({"CONTAINER": "i", "CONTAINER_RUNTIME": "docker"}, "CONTAINER_RUNTIME=docker: choose pyxis"),
    "a runtime that is missing": ({"CONTAINER": "i", "CONTAINER_RUNTIME": "singularity"}, "no program of this name"),
    "pyxis outside of Slurm": ({"CONTAINER": "i", "CONTAINER_RUNTIME": "pyxis"}, "it needs a Slurm job"),
}  # fmt: skip


def test_requeued_job_resumes_in_its_own_folder(place):
    """`resume=auto` takes the place of the user's checkpoint, and alone it would mean the default folder."""
    given = "resume=/another/run/checkpoints/step-00000005"
    checkpoints = place.home / RUN / "checkpoints"
    for restart, saved in (("0", False), ("1", False), ("1", True)):
        if saved:
            (checkpoints / "step-00000007").mkdir(parents=True)
        slurm(place, given, SLURM_RESTART_COUNT=restart, VENV=f"{place.home}/a venv")
        words = place.calls()[-2].args
        assert words[words.index(given) + 1 :][-2:] == (
            ["resume=auto", f"run.dir={place.home / RUN}"] if saved else ["recipe=llama_debug", "run.name=a name"]
        )


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize(
    "script", [["local.sh"], pytest.param(["multihost.sh", "n0", "--"], marks=FULL)], ids=["local", "multihost"]
)
def test_wrong_environment_is_one_line_error(script, wrong, place):
    env, message = REFUSED[wrong]
    if "runtime" in wrong and any(shutil.which(name, path=PATH) for name in ("apptainer", "singularity")):
        pytest.skip("this machine has a container runtime")
    done = place.run(*script, **env)
    assert done.returncode == 2
    assert re.search(message, one_error(done.stderr)), done.stderr


def test_a_batch_script_run_by_hand_says_to_submit_it(place):
    done = place.run("train.sbatch")
    assert done.returncode == 2 and "submit it with sbatch: sbatch" in one_error(done.stderr)


# ---------------------------------------------------------------------------------------------------- with real Python


@pytest.fixture
def whole(place) -> dict[str, str]:
    """The variables of a run of this repository's program in a container, which alone has Python."""
    program(place.outside / "apptainer", APPTAINER)
    for name in ("ndtrain", "conf", "recipes"):
        shutil.copytree(ROOT / name, place.repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    inside = f"{Path(sys.executable).parent}:{PATH}"
    return {"PATH": f"{place.outside}:{PATH}", "INSIDE": inside, "CONTAINER": str(place.image), "PYTHONPATH": ""}


@FULL
@pytest.mark.parametrize("hosts", [[], ["localhost", "127.0.0.1"]], ids=["local", "multihost"])
def test_run_in_container_trains_to_end(hosts, place, whole):
    argv = ["launch/multihost.sh", *hosts, "--"] if hosts else ["launch/local.sh"]
    args = arguments(place.home / RUN, write_corpus(place.home / "a corpus.txt"), "mesh.fsdp=2")
    program(place.outside / "remote", '#!/usr/bin/env bash\nexec bash -c "$2"\n')
    with script(["bash", *argv, *args], place.repository, 1 if hosts else 2, SSH="remote", **whole) as process:
        code = process.wait(START_S)
    assert code == 0, (place.repository / "err").read_text()
    assert len(rows(place.home / RUN)) == 10


@FULL
def test_a_second_signal_ends_a_container_at_once(place, whole):
    """The program of the container is between the script and torchrun."""
    args = arguments(place.home / RUN, write_corpus(place.home / "a corpus.txt"), *LONG, "train.global_batch=20000")
    with script(["bash", "launch/local.sh", *args], place.repository, **whole) as process:
        wait_for(lambda: "run folder" in (place.repository / "out").read_text(), "the first step", START_S)
        process.terminate()
        time.sleep(3)
        process.terminate()
        assert process.wait(5) == 143
        wait_for(lambda: not processes(place.repository), "all processes to end", 2)
