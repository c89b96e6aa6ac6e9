"""Several hosts on one machine: network namespaces on a bridge. Each host has its own name, and an /etc/hosts with the
names of all. They share this machine's files, as on a cluster with shared storage.

with hosts(2) as (n0, n1):
    n0.popen(["hostname"], cwd)        # prints n0
    n1.cut()                           # disconnects n1 from the network
"""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lib.helpers import environments, reset_signals

PORT = 29400  # torchrun's default; each host has its own ports
CARD = "eth0"
_ENTER = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_ISOLATED = ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh"]
_TRIAL = [  # the network commands of `hosts`, run in a namespace that ends with its shell
    "ip link add b0 type bridge", "ip link add v0 type veth peer name v1", "ip link set v0 master b0",
    f"tc qdisc add dev v0 root tbf rate 1mbit burst {2**16} latency 50ms",
]  # fmt: skip
_numbers = itertools.count()


@functools.cache
def missing() -> str | None:
    """The reason why hosts cannot be created here; None: they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    lacking = [tool for tool in ("ip", "tc", "nsenter", "unshare", "mount") if not shutil.which(tool)]
    if lacking:
        return f"network namespaces need {', '.join(lacking)} (Debian: iproute2, util-linux)"
    trial = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", "\n".join(_TRIAL)]
    tried = subprocess.run(trial, capture_output=True, text=True)
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """One host.

    Attributes:
        name: the host name: n0, n1, ...
        address: IPv4, valid within one `hosts()`.
        namespace: its network namespace.
        switch: the namespace of the bridge; the other end of this host's cable has the host's name there.
        names: the file that is mounted at /etc/hosts.
        started: the processes started on it.
    """

    name: str
    address: str
    namespace: str
    switch: str
    names: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def popen(self, argv: Sequence[str], cwd: Path, env: dict[str, str] | None = None, **kw: Any) -> subprocess.Popen:
        """Starts a program on this host, in its own session.

        Args:
            env: variables added to those of this process.
            kw: further arguments of `subprocess.Popen`.
        """
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", *_ISOLATED, self.name, str(self.names)]
        given = {"cwd": cwd, "env": os.environ | (env or {}), "start_new_session": True, "preexec_fn": reset_signals}
        self.started.append(subprocess.Popen([*enter, *argv], **(given | kw)))
        return self.started[-1]

    def torchrun(
        self,
        hosts: Sequence["Host"],
        nproc: int,
        args: Sequence[str],
        cwd: Path,
        *,
        module: str = "ndtrain.train",
        nnodes: int | str | None = None,
        max_restarts: int = 0,
        endpoint: "Host | None" = None,
        rdzv_id: str = "test",
        rdzv_conf: str = "",
        **kw: Any,
    ) -> subprocess.Popen:
        """Starts torchrun on this host, for a job on `hosts`.

        Args:
            nproc: number of ranks on this host.
            args: the arguments of `module` (overrides).
            nnodes: a number or a range ("1:2"); None: all of `hosts`.
            endpoint: the host of the rendezvous store; None: the first.
            rdzv_conf: as torchrun's `--rdzv-conf`.
            kw: as for `popen`.
        """
        flags = {
            "nnodes": nnodes or len(hosts), "nproc-per-node": nproc, "max-restarts": max_restarts,
            "rdzv-backend": "c10d", "rdzv-id": rdzv_id, "rdzv-endpoint": f"{(endpoint or hosts[0]).name}:{PORT}",
        } | ({"rdzv-conf": rdzv_conf} if rdzv_conf else {})  # fmt: skip
        options = [f"--{name}={value}" for name, value in flags.items()]
        return self.popen([sys.executable, "-m", "torch.distributed.run", *options, "-m", module, *args], cwd, **kw)

    # -------------------------------------------------------------------------------------------------- the processes

    def processes(self) -> dict[int, str]:
        """The living processes of this host: pid -> rank ("" if it is no rank)."""
        here, ranks = os.stat(f"/run/netns/{self.namespace}"), {}
        for folder, variables in environments():
            with suppress(OSError):  # it has ended meanwhile
                if os.path.samestat(os.stat(folder / "ns" / "net"), here):
                    ranks[int(folder.name)] = variables.get("RANK", "")
        return ranks

    def ranks(self) -> dict[int, int]:
        """The living ranks of a job on this host: pid -> rank."""
        return {pid: int(rank) for pid, rank in self.processes().items() if rank}

    def kill(self) -> None:
        """Sends SIGKILL to all processes of this host, as in a power failure."""
        end = time.monotonic() + 20
        while pids := self.processes():
            assert time.monotonic() < end, f"{self.name}: {pids} do not die"
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------------ the cable

    def cut(self) -> None:
        """Disconnects this host: packets from and to it are lost."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def mend(self) -> None:
        """Connects this host again."""
        _ip("-n", self.switch, "link", "set", self.name, "up")

    def plug_into(self, bridge: str) -> None:
        """Connect this host to a bridge, which is created if it is missing. Each bridge is a network of its own."""
        if _ip_fails("-n", self.switch, "link", "show", bridge):
            _bridge(self.switch, bridge)
        _ip("-n", self.switch, "link", "set", self.name, "master", bridge)

    def replace_card(self, card: str) -> None:
        """Give this host's address to another network card, and disconnect the present one."""
        _ip("-n", self.namespace, "link", "set", CARD, "down")
        _ip("-n", self.namespace, "address", "flush", "dev", CARD)
        _ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", card)
        _ip("-n", self.namespace, "link", "set", card, "up")

    def sent_bytes(self, card: str = CARD) -> int:
        """Return the bytes that this host has sent."""
        shown = subprocess.run(
            ["ip", "-n", self.namespace, "-s", "-j", "link", "show", card], capture_output=True, text=True, check=True
        )
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])

    def limit(self, mbit: float) -> None:
        """Limits the bandwidth from this host and to it to `mbit` Mbit/s each."""
        shape = ["root", "tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", str(2**16), "latency", "50ms"]
        for namespace, device in ((self.namespace, CARD), (self.switch, self.name)):
            _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)


@contextmanager
def hosts(n: int = 2) -> Iterator[list[Host]]:
    """Creates `n` hosts on their own network. At the end of the block their processes are killed and they are
    deleted."""
    group = f"ndtrain-{os.getpid()}-{next(_numbers)}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        names = Path(folder, "hosts")
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{_address(i)} n{i}\n" for i in range(n)))
        switch = _namespace(f"{group}-switch", after)
        _bridge(switch, "bridge")
        made = [Host(f"n{i}", _address(i), f"{group}-n{i}", switch, names) for i in range(n)]
        for host in made:
            _connect(host, after)
        yield made


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _namespace(name: str, after: ExitStack) -> str:
    _ip("netns", "add", name)
    after.callback(_ip, "netns", "del", name)  # its network devices go with it
    _ip("-n", name, "link", "set", "lo", "up")
    return name


def _connect(host: Host, after: ExitStack) -> None:
    _namespace(host.namespace, after)
    after.callback(_end, host)
    _ip("-n", host.switch, "link", "add", host.name, "type", "veth", "peer", "name", CARD, "netns", host.namespace)
    _ip("-n", host.switch, "link", "set", host.name, "master", "bridge", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CARD)
    _ip("-n", host.namespace, "link", "set", CARD, "up")


def _end(host: Host) -> None:
    for process in host.started:
        process.kill()  # it may not have come to its host yet
    host.kill()
    for process in host.started:
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()


def _bridge(switch: str, name: str) -> None:
    _ip("-n", switch, "link", "add", name, "type", "bridge")
    _ip("-n", switch, "link", "set", name, "up")


def _ip_fails(*words: str) -> bool:
    return bool(subprocess.run(["ip", *words], capture_output=True).returncode)


def _ip(*words: str) -> None:
    _do("ip", *words)


def _do(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
