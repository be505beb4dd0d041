"""What Linux knows about a bulk connection beyond sending: its class, its pace, its queue. Plain sockets and TLS alike.

Source: socket(7) SO_MAX_PACING_RATE and SO_PRIORITY, ip(7) IP_TOS, ipv6(7), tcp(7) TCP_INFO and SIOCOUTQ.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import logging
import socket
import struct
import termios
from typing import NamedTuple

from memstore.shell.net.tls import TlsStream

log = logging.getLogger("memstore")
SO_MAX_PACING_RATE = 47
TC_PRIO_FILLER = 1
"""Linux's names; a queue that knows priorities (pfifo_fast, fq, prio) serves this one last."""
_PACE = struct.Struct("@L")
_MIN_RTT = struct.Struct("@I")
_MIN_RTT_AT = 148  # of tcpi_min_rtt in struct tcp_info, microseconds; all ones until one was measured
_RTT_MAX_US = 1_000_000


class Flight(NamedTuple):
    """Bytes that were sent and that the peer's kernel has not acknowledged, and how soon it could have."""

    unacked_bytes: int
    rtt_s: float


def classify(sock: socket.socket | TlsStream, dscp: int) -> None:
    """Mark later bytes with a class for the network, and send them behind all others of this host."""
    if sock.family == socket.AF_INET6:
        _set(sock, socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2, "a class (dscp)")
    if sock.family in (socket.AF_INET, socket.AF_INET6):  # an IPv4 address may be reached through either
        _set(sock, socket.IPPROTO_IP, socket.IP_TOS, dscp << 2, "a class (dscp)")
    _set(sock, socket.SOL_SOCKET, socket.SO_PRIORITY, TC_PRIO_FILLER, "a priority")  # IP_TOS has set another


def pace(sock: socket.socket | TlsStream, bytes_per_s: int) -> None:
    """Have the kernel pace later bytes."""
    _set(sock, socket.SOL_SOCKET, SO_MAX_PACING_RATE, _PACE.pack(bytes_per_s), "a pace (replicate_bytes_per_s)")


def end_after_silence(sock: socket.socket | TlsStream, silence_s: float) -> None:
    """End the connection once the other end has taken nothing for so long, or its kernel has not answered a probe.

    The kernel counts the time in which a receiver's buffer is full as well, so a process that is stopped is a silence.
    """
    what = "an early end of silent connections"
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(silence_s * 1000)),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
    ):
        _set(sock, socket.IPPROTO_TCP, option, value, what)


def flight(sock: socket.socket | TlsStream) -> Flight:
    """Return the bytes in transit; 0 if the connection is gone."""
    answer, rtt_us = array.array("i", [0]), 0
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, answer)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + _MIN_RTT.size)
        if len(info) == _MIN_RTT_AT + _MIN_RTT.size:  # older kernels say less
            (rtt_us,) = _MIN_RTT.unpack_from(info, _MIN_RTT_AT)
    return Flight(answer[0], rtt_us / 1e6 if rtt_us < _RTT_MAX_US else 0.0)


def _set(sock: socket.socket | TlsStream, level: int, option: int, value: int | bytes, what: str) -> None:
    try:
        sock.setsockopt(level, option, value)
    except OSError as exc:
        if sock.fileno() >= 0:  # else the connection is closed, and the next send says so
            _log_refused(what, str(exc))


@functools.cache
def _log_refused(what: str, why: str) -> None:
    """Log once for each reason: every connection would repeat it."""
    log.warning("memstore: this host's kernel refuses %s for copies (%s): they leave without it", what, why)
