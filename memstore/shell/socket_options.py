"""What Linux knows about a bulk connection beyond sending: its class, its pace, its queue. Plain sockets and TLS alike.

Source: socket(7) SO_MAX_PACING_RATE and SO_PRIORITY, ip(7) IP_TOS, ipv6(7), tcp(7) SIOCOUTQ.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import termios

from memstore.shell.tls import TlsStream

SO_MAX_PACING_RATE = 47
TC_PRIO_FILLER = 1
"""Linux's names; a queue that knows priorities (pfifo_fast, fq, prio) serves this one last."""
_PACE = struct.Struct("@L")


def classify(sock: socket.socket | TlsStream, dscp: int) -> None:
    """Mark what is sent from now on with a class for the network, and put it behind all else on this host."""
    with contextlib.suppress(OSError):  # the connection is gone: the next send says so
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, TC_PRIO_FILLER)  # IP_TOS has set another


def pace(sock: socket.socket | TlsStream, bytes_per_s: int) -> None:
    """Have the kernel space out what is sent from now on."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, _PACE.pack(bytes_per_s))


def queued_bytes(sock: socket.socket | TlsStream) -> int:
    """Return the bytes that were sent and that the peer's kernel has not acknowledged; 0 if the connection is gone."""
    answer = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, answer)
    return answer[0]
