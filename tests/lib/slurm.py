"""A Slurm cluster for tests: a controller and two nodes with two simulated GPUs each, all on this machine.

with cluster(folder) as slurm:
    job = slurm.submit(["-N", "2", "script.sh"], cwd)
    slurm.wait(job, "COMPLETED")
"""

import functools
import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.lib.debian import install_debian_packages
from tests.lib.helpers import MARK, environments, processes, wait_for

NODES = ("n0", "n1")
GPUS = 2  # of each node
PACKAGES = ["slurmctld", "slurmd", "slurm-client"]
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel"]
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian keeps the daemons
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 Gres=gpu:test:{gpus}
PartitionName=usual Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n[0-1] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def missing() -> str | None:
    """The reason why Slurm cannot be started here; None: it can. Missing Debian packages are installed if possible,
    which takes some seconds."""
    lacking = [p for p in PROGRAMS if not shutil.which(p, path=PATH)]
    if lacking and (why := install_debian_packages(*PACKAGES)):
        return f"no Slurm here ({', '.join(lacking)} not found; {why})"
    if os.geteuid() != 0:
        return "the pretended GPUs of the test nodes are device files, which only root can make"
    return None


@dataclass
class Cluster:
    """A running Slurm cluster. The processes of its jobs are marked with its folder, for `helpers.processes`."""

    folder: Path
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        own = {"SLURM_CONF": f"{self.folder}/slurm.conf", MARK: str(self.folder), "PATH": PATH}
        return os.environ | own

    def call(self, *argv: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """The output of a Slurm command.

        Raises:
            AssertionError: it failed; the message is its stderr.
        """
        done = subprocess.run(argv, cwd=cwd, env=self.env | (env or {}), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    def submit(self, argv: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> str:
        """Submits a job and returns its number. `argv`: sbatch's options, the script and its arguments."""
        return self.call("sbatch", "--parsable", *argv, cwd=cwd, env=env).strip()

    def show(self, job: str) -> dict[str, str]:
        """The output of `scontrol show job` as key -> value. `job` may be a task of an array: 12_3."""
        words = self.call("scontrol", "-o", "show", "job", job).split()
        return dict(w.partition("=")[::2] for w in words)

    def wait(self, job: str, state: str, timeout: float = 300) -> dict[str, str]:
        """Waits until the job is in `state`. Returns its `show` at that time."""
        end = time.monotonic() + timeout
        while (now := self.show(job))["JobState"] != state:
            assert time.monotonic() < end, f"job {job} is {now['JobState']} and not {state}: {now}\n{self.output(now)}"
            time.sleep(0.2)
        return now

    def wait_for_restart(self, job: str, count: int = 1, timeout: float = 300) -> None:
        """Waits until the job has been requeued `count` times."""
        restarted = lambda: int(self.show(job)["Restarts"]) >= count
        wait_for(restarted, f"job {job} to be queued again\n{self.output(self.show(job))}", timeout, pause=0.2)

    def output(self, shown: dict[str, str]) -> str:
        """The output of a job, given its `show`."""
        path = Path(shown["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def ranks(self) -> dict[int, str]:
        """The living ranks of all jobs: pid -> rank."""
        return {pid: rank for pid, rank in processes(self.folder).items() if rank and _trains(pid)}

    # ---------------------------------------------------------------------------------------------------- the daemons

    def start(self, name: str) -> None:
        """Starts the daemon of a node or of the controller."""
        argv = ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        log = (self.folder / f"{name}.out").open("a")
        env = self.env | {MARK: f"{self.folder}/{name}"}
        self.daemons[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def lose(self, node: str) -> None:
        """Kills a node with all its processes, and tells the controller that it is down."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for folder, variables in environments():
            if variables.get("SLURMD_NODENAME") == node and variables.get(MARK) == str(self.folder):
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(int(folder.name), signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def bring_back(self, node: str) -> None:
        """Starts a lost node. If the controller has taken it back already, there is nothing left to resume."""
        self.start(node)
        try:
            self.call("scontrol", "update", f"nodename={node}", "state=resume")
        except AssertionError as error:
            if "Invalid node state" not in str(error):
                raise

    def ready(self) -> bool:
        """Whether every node can take a job."""
        done = subprocess.run(["scontrol", "-o", "show", "node"], env=self.env, capture_output=True, text=True)
        return done.stdout.count("State=IDLE ") == len(NODES)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a Slurm cluster with its files in `folder`. All its processes are killed at the end of the block."""
    made = Cluster(folder)
    for name in ("state", *(f"spool-{n}" for n in NODES)):
        (folder / name).mkdir()
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    conf = CONF.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=_free_ports(), gpus=GPUS)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(f"Name=gpu Type=test File={folder}/gpu[0-{GPUS - 1}]\n")
    try:
        for name in ("slurmctld", *NODES):
            made.start(name)
        wait_for(made.ready, f"the nodes; see {folder}/*.log", 60, pause=0.1)
        yield made
    finally:
        for process in made.daemons.values():
            process.kill()
            process.wait()
        for mark in (folder, *(folder / name for name in made.daemons)):  # the jobs, and the daemons' children
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)


def _trains(pid: int) -> bool:
    """Whether a process is a rank itself, and not the one beside rank 0 that copies its output."""
    try:
        return b"ndtrain.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False


def _free_ports() -> list[int]:
    """Three consecutive free ports."""
    for port in range(16900, 20000, 3):
        with ExitStack() as held:
            try:
                for number in range(3):
                    held.enter_context(socket.socket()).bind(("", port + number))
                return [port, port + 1, port + 2]
            except OSError:
                continue
    raise OSError("no free ports for a Slurm between 16900 and 20000")
