"""Where the sockets of a job listen: on loopback where all its ranks are on one host, else on an interface.

gloo and NCCL take the interface from `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`. A TCPStore listens on all
interfaces, unless it is handed a socket that listens already.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ndtrain.config import ConfigError

LOOPBACK = "127.0.0.1"
INTERFACE = "NDTRAIN_INTERFACE"  # the network interface of a job on several hosts; the launch scripts' INTERFACE
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_BACKLOG = 4096


def on_one_host() -> bool:
    """Whether the launcher has started all ranks on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")


def choose_interface(one_host: bool) -> None:
    """Makes gloo and NCCL listen on loopback on one host, else on the chosen interface, unless the user's variables say
    where.

    Raises:
        ConfigError: the chosen interface has no address.
    """
    name = _loopback_interface() if one_host else os.environ.get(INTERFACE)
    if name:
        if not one_host:
            interface_address(name)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a bare name for the beginning of one


def _loopback_interface() -> str | None:
    name = "lo0" if sys.platform == "darwin" else "lo"
    return name if any(name == there for _, there in socket.if_nameindex()) else None


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    known = ", ".join(there for _, there in socket.if_nameindex())
    raise ConfigError(f"{INTERFACE}={name}: no interface of host {socket.gethostname()} with an IPv4 address: {known}")


def address_to_serve(host: str) -> str:
    """The address of this host to listen on, so that who connects to `host` is answered: the one that `host` stands
    for, else that of the chosen interface; "": all addresses.

    A name that stands for loopback here (as the host's own name does on Debian) may stand for another address on the
    other hosts, so it says nothing.
    """
    own = (address for address in _addresses(host) if _is_own(address))
    meant = host == "localhost" or is_loopback(host)
    if address := next((address for address in own if meant or not is_loopback(address)), None):
        return address
    name = os.environ.get(INTERFACE)
    return interface_address(name) if name else ""


def public_addresses() -> list[str]:
    """Those addresses that this rank's gloo sockets, or the ranks' store, listen on and that are public: anyone on the
    internet can reach them, unless a firewall is in between."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    places = [socket.gethostname()] * (not name) + [os.environ.get("MASTER_ADDR", "")] * (not on_one_host())
    heard = [address for place in places if place for address in _addresses(place) if _is_own(address)]
    with suppress(ConfigError):  # several names, which gloo takes too
        heard += [interface_address(name)] if name else []
    return sorted({address for address in heard if ipaddress.ip_address(address).is_global})


def is_own(host: str) -> bool:
    """Whether the name or address is one of this host."""
    return any(map(_is_own, _addresses(host)))


def is_loopback(address: str) -> bool:
    """Whether it is an address of loopback; a name is not."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _addresses(host: str) -> list[str]:
    """What the name stands for; IPv4 first, since a loopback of IPv6 may be missing."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(place[0]) for _, _, _, _, place in sorted(found, key=lambda f: f[0] != socket.AF_INET)]
    return []


def _is_own(address: str) -> bool:
    """Whether this host can listen on the address."""
    with suppress(OSError):
        _listen(address, 0).close()
        return True
    return False


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def serve_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A store that this process serves on one address.

    Args:
        address: "": all addresses.
        port: 0: any free one.
        timeout_s: of its operations, in seconds.

    Raises:
        OSError: the port is taken.
    """
    listener = _listen(address, port) if address else _listen_everywhere(port)
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address or LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return _listen("", port)
