"""Copies out of this process's own memory that fail where memory is gone, instead of ending the process.

Training may free what a copy reads: `untyped_storage().resize_(0)`, as offloading does, gives large memory back to the
kernel at once, and a plain read of it is a segmentation fault. So the kernel is asked to copy; it answers EFAULT.
That takes a third longer than a memmove. Freed memory that is in use again is copied like any other.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os

log = logging.getLogger("memstore")
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc.process_vm_readv.argtypes = (
    ctypes.c_int, ctypes.POINTER(_Range), ctypes.c_ulong, ctypes.POINTER(_Range), ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def copy_own(target: int, source: int, nbytes: int) -> bool:
    """Copy host memory between two addresses, without the GIL; False if some of it is not there.

    Raises:
        OSError: The system call is not permitted, or the kernel has no memory for it.
    """
    while nbytes:
        to, at = _Range(target, nbytes), _Range(source, nbytes)
        done = _libc.process_vm_readv(os.getpid(), ctypes.byref(to), 1, ctypes.byref(at), 1, 0)
        if done <= 0:
            number = ctypes.get_errno()
            if done == 0 or number == errno.EFAULT:
                return False
            raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
        target, source, nbytes = target + done, source + done, nbytes - done
    return True


@functools.cache
def is_permitted() -> bool:
    """Return whether this process may use the call: some sandboxes refuse it."""
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    try:
        return copy_own(ctypes.addressof(target), ctypes.addressof(source), 1)
    except OSError as error:
        log.warning("memory of this process cannot be read by process_vm_readv (%s): no put overlaps", error)
        return False
