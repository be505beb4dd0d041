"""The address of this machine for other hosts: by default, by interface name, or by network. Linux only."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

from memstore import errors

SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
"""struct ifreq of a 64-bit kernel: a name, then a union that holds a sockaddr_in."""
_IFREQ_COUNT_MAX = 1024
_PROBE = ("192.0.2.1", 9)
"""A documentation address (RFC 5737): connecting a datagram socket sends nothing, it only asks for a route."""


def resolve_interfaces(specs: str | Sequence[str] | None) -> list[str]:
    """Return the address of each of several networks, as `resolve_interface`; ConfigError if two have the same."""
    found: dict[str, str | None] = {}
    for spec in [specs] if specs is None or isinstance(specs, str) else specs:
        address = resolve_interface(spec)
        if address in found:
            raise errors.ConfigError(
                f"interface names {found[address]!r} and {spec!r}, which are the same address {address}: name networks "
                "of different cards",
                field="interface",
            )
        found[address] = spec
    return list(found)


def resolve_interface(spec: str | None) -> str:
    """Return the IPv4 address (IPv6 where there is no IPv4) of this machine that `spec` means.

    None: the address the default route uses, else the first that is not loopback, else 127.0.0.1. Otherwise an
    interface ("eth2"), a network ("10.20.0.0/16") or an address. Raises ConfigError that lists the addresses here.
    """
    found = interface_addresses()
    if spec is None:
        return _primary(found)
    try:
        network = ipaddress.ip_network(spec, strict=False)
    except ValueError:
        chosen = [address for name, address in found if name == spec]
    else:
        # A network of the other IP version contains nothing; ipaddress answers that without an error.
        chosen = [address for _, address in found if ipaddress.ip_address(address) in network]
    if not chosen:
        here = ", ".join(f"{name} {address}" for name, address in found) or "none"
        raise errors.ConfigError(
            f"interface={spec!r} matches no address of this machine; it has: {here}", field="interface"
        )
    return chosen[0]


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of the interfaces that are up, IPv4 before IPv6, link-local IPv6 left out."""
    return _ipv4() + _ipv6()


def _primary(found: list[tuple[str, str]]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_PROBE)
            address: str = probe.getsockname()[0]
        except OSError:
            address = "0.0.0.0"
    if address in {known for _, known in found}:
        return address
    return next((known for _, known in found if not ipaddress.ip_address(known).is_loopback), "127.0.0.1")


def _ipv4() -> list[tuple[str, str]]:
    # SIOCGIFCONF fills an array of ifreq at a pointer; `array` is the simplest stdlib owner of such memory.
    memory = array("B", bytes(_IFREQ.size * _IFREQ_COUNT_MAX))
    pointer, size = memory.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), SIOCGIFCONF, struct.pack("iL", size, pointer))
    used = struct.unpack("iL", answer)[0]
    pairs = []
    for name, union in _IFREQ.iter_unpack(memory.tobytes()[: used // _IFREQ.size * _IFREQ.size]):
        pairs.append((name.split(b"\0", 1)[0].decode(errors="replace"), socket.inet_ntoa(union[4:8])))
    return pairs


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    pairs = []
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            pairs.append((name, str(address)))
    return pairs
