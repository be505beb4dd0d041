"""Which host and which life of its holder this is, and what the machine offers.

Ranks, holders and tools ask it: the host id, the address that others should use, the limit of open files.

The identity of a host: the id under which a machine's memory is known, and how a rank finds it (R1, R4).

Imports neither torch nor ray. The id names a folder, so it is checked like a file name.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import stat
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memstore import errors
from memstore.config import check_name, commands_naming
from memstore.errors import ConfigError

HOST_LABEL = "host"
HOST_VARIABLE = "MEMSTORE_HOST"
_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_HOSTNAME_CHARS = 40  # with "-" and 8 characters of boot id well under the 64 of a name
_BOOT_ID_CHARS = 8


@dataclass(frozen=True)
class HostIdentity:
    """The identity that a holder registers: one unit of loss, with labels that name its failure domains.

    `machine` is the boot id. `is_explicit` says that the node carries a `host` label: only two hosts that both do
    count as distinct on one machine (R1); MEMSTORE_HOST names a host but does not vouch for it.
    """

    host_id: str
    machine: str
    is_explicit: bool
    labels: Mapping[str, str] = field(default_factory=dict)


def host_identity(labels: Mapping[str, str], env: Mapping[str, str], *, hostname: str, boot_id: str) -> HostIdentity:
    """Return the identity of a node: its `host` label, else MEMSTORE_HOST, else hostname and boot id (R1).

    Never the Ray node id, which is new after every restart of the raylet while the memory is still there.

    Raises:
        ConfigError: the label or variable is not usable as a name; the error names it.
    """
    label, variable = labels.get(HOST_LABEL, ""), env.get(HOST_VARIABLE, "")
    if label:
        host_id = check_name(f"host (node label {HOST_LABEL})", label)
    elif variable:
        host_id = check_name(f"host ({HOST_VARIABLE})", variable)
    else:
        host_id = f"{_short_hostname(hostname)}-{boot_id[:_BOOT_ID_CHARS]}"
    return HostIdentity(host_id, boot_id, bool(label), dict(labels))


def local_identity(labels: Mapping[str, str], env: Mapping[str, str]) -> HostIdentity:
    """Return `host_identity` with this machine's hostname and boot id."""
    return host_identity(labels, env, hostname=socket.gethostname(), boot_id=read_boot_id())


def read_boot_id(path: str = _BOOT_ID_PATH) -> str:
    """Return the kernel's boot id, equal for all containers of one machine and new after a reboot.

    Raises:
        ConfigError: the kernel does not say it; names the variable to set instead.
    """
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"cannot read the machine's boot id from {path} ({exc}): memstore needs Linux with /proc mounted",
            field=HOST_VARIABLE,
        ) from exc
    if not re.fullmatch(r"[0-9a-f-]{8,64}", text):
        raise ConfigError(f"the boot id in {path} is {text!r}, not 8 to 64 hex digits", field=HOST_VARIABLE)
    return text


def current_node_labels() -> dict[str, str] | None:
    """Return the labels of the Ray node this process is connected to; None where Ray is not in use."""
    ray = sys.modules.get("ray")
    is_initialised = getattr(ray, "is_initialized", None)
    if ray is None or is_initialised is None or not is_initialised():
        return None
    here = ray.get_runtime_context()
    try:  # kept by the process since it connected: no call to the GCS, which may be down (R4)
        labels = here.get_node_labels()
    except AttributeError:  # Ray 2.49 keeps none in the process that started the cluster, and with it the GCS
        labels = next(node["Labels"] for node in ray.nodes() if node["NodeID"] == here.get_node_id())
    return {str(key): str(value) for key, value in labels.items()}


def rank_host(
    env: Mapping[str, str], arena_root_dir: str | os.PathLike[str], ray_node_labels: Mapping[str, str] | None
) -> str:
    """Return the host id of the holder that a rank on this machine talks to (R4).

    MEMSTORE_HOST, else the host of the rank's Ray node, else the machine's only holder.

    Args:
        env: The rank's environment.
        arena_root_dir: `<arena_dir>/memstore-<uid>/<store>`, with one folder per host.
        ray_node_labels: From `current_node_labels`; None for a rank outside of Ray.

    Raises:
        ConfigError: none or several holders, all of them listed.
    """
    if env.get(HOST_VARIABLE):
        return check_name(f"host ({HOST_VARIABLE})", env[HOST_VARIABLE])
    if ray_node_labels is not None:
        return local_identity(ray_node_labels, env).host_id
    answering = holder_hosts(arena_root_dir)
    hosts = [host for host, is_answering in answering.items() if is_answering] or list(answering)
    if len(hosts) == 1:
        return hosts[0]
    if not hosts:
        store_dir = Path(arena_root_dir)
        advice = commands_naming(store_dir.name, str(store_dir.parent.parent), "run `memstore up`")
        raise ConfigError(
            f"no holder on this machine ({arena_root_dir} has no host folder): {advice}, "
            f"connect from a process of the Ray cluster, or set {HOST_VARIABLE}",
            field=HOST_VARIABLE,
            hosts=[],
        )
    shown = ", ".join(hosts[:10]) + (f" and {len(hosts) - 10} more" if len(hosts) > 10 else "")
    raise ConfigError(
        f"{len(hosts)} holders on this machine ({shown}) and nothing says which one serves this process: "
        f"set {HOST_VARIABLE} to one of them",
        field=HOST_VARIABLE,
        hosts=hosts,
    )


def holder_hosts(arena_root_dir: str | os.PathLike[str]) -> dict[str, bool]:
    """Return the host folders of a store on this machine, sorted; True where a holder's socket answers."""
    try:
        folders = sorted(entry.path for entry in os.scandir(arena_root_dir) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return {}
    return {os.path.basename(path): _is_answering(path) for path in folders}


def _is_answering(folder: str) -> bool:
    """Return whether some Unix socket in `folder` has a listener; a frozen one counts, its backlog accepts."""
    try:
        directory_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone, or another user's
    try:
        names = os.listdir(directory_fd)
        return any(_has_listener(directory_fd, name) for name in names)
    finally:
        os.close(directory_fd)


def _has_listener(directory_fd: int, name: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # connecting to a Unix socket never waits: it is there, refused, or full
        try:
            # Through the folder's descriptor, because a socket's address may have 107 bytes and a path has more.
            probe.connect(f"/proc/self/fd/{directory_fd}/{name}")
        except BlockingIOError:
            return True  # the backlog is full: there is a listener, but a slow one
        except OSError:
            return False
        return True


def _short_hostname(hostname: str) -> str:
    """Return `hostname` as a legal name of at most 40 characters; a digest stands for the cut part.

    Pods of one deployment differ only in the last characters of a long name.
    """
    legal = re.sub(r"[^A-Za-z0-9._-]", "-", hostname).lstrip("._-") or "host"
    if len(legal) <= _HOSTNAME_CHARS and legal == hostname:
        return legal
    digest = hashlib.blake2b(hostname.encode(), digest_size=4).hexdigest()
    return f"{legal[: _HOSTNAME_CHARS - 9]}-{digest}"


# -- interface ----------------------------------------------------------------------------------------
# The address of this machine for other hosts: by default, by interface name, or by network. Linux only.


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
