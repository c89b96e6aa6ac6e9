"""The addresses on which a job's sockets listen: loopback if all ranks are on one host, else a network interface.

gloo and NCCL read the interface from `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`. A TCPStore listens on all
interfaces unless it gets a socket that is already listening.
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
# Variable with the network interface of a job on several hosts. The launch scripts set it from INTERFACE.
INTERFACE = "NDTRAIN_INTERFACE"
_SIOCGIFADDR = 0x8915  # Linux ioctl that returns the IPv4 address of an interface
_BACKLOG = 4096


def on_one_host() -> bool:
    """Return True if the launcher has started all ranks on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")


def choose_interface(one_host: bool) -> None:
    """Make gloo and NCCL listen on loopback if there is only one host, else on the chosen interface.

    Variables set by the user have priority.

    Raises:
        ConfigError: the chosen interface has no address.
    """
    name = _loopback_interface() if one_host else os.environ.get(INTERFACE)
    if name:
        if not one_host:
            interface_address(name)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL treats a name without `=` as a prefix


def _loopback_interface() -> str | None:
    name = "lo0" if sys.platform == "darwin" else "lo"
    return name if any(name == there for _, there in socket.if_nameindex()) else None


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    known = ", ".join(there for _, there in socket.if_nameindex())
    raise ConfigError(f"{INTERFACE}={name}: no interface of host {socket.gethostname()} with an IPv4 address: {known}")


def address_to_serve(host: str) -> str:
    """Return the address of this host to listen on, to accept connections to `host`.

    It is the address that `host` resolves to, else the address of the chosen interface, else "" for all addresses.

    A name that resolves to loopback here (as the host's own name does on Debian) may resolve to another address on
    other hosts. Such a loopback address is therefore ignored.
    """
    own = (address for address in _addresses(host) if _is_own(address))
    meant = host == "localhost" or is_loopback(host)
    if address := next((address for address in own if meant or not is_loopback(address)), None):
        return address
    name = os.environ.get(INTERFACE)
    return interface_address(name) if name else ""


def public_addresses() -> list[str]:
    """Return the public addresses on which this rank's gloo sockets or the ranks' store listen.

    Anyone on the internet can reach them, unless a firewall prevents it.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    places = [socket.gethostname()] * (not name) + [os.environ.get("MASTER_ADDR", "")] * (not on_one_host())
    heard = [address for place in places if place for address in _addresses(place) if _is_own(address)]
    with suppress(ConfigError):  # the variable may hold several names, which gloo accepts
        heard += [interface_address(name)] if name else []
    return sorted({address for address in heard if ipaddress.ip_address(address).is_global})


def is_own(host: str) -> bool:
    """Return True if the name or address belongs to this host."""
    return any(map(_is_own, _addresses(host)))


def is_loopback(address: str) -> bool:
    """Return True if the text is a loopback address. Return False for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _addresses(host: str) -> list[str]:
    """Return the addresses that a name resolves to, IPv4 first, because IPv6 may have no loopback here."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return [str(place[0]) for _, _, _, _, place in sorted(found, key=lambda f: f[0] != socket.AF_INET)]
    return []


def _is_own(address: str) -> bool:
    """Return True if this host can listen on the address."""
    with suppress(OSError):
        _listen(address, 0).close()
        return True
    return False


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def serve_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Create a store that this process serves on one address.

    Args:
        address: "" for all addresses.
        port: 0 for any free port.
        timeout_s: timeout of the store's operations, in seconds.

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
