"""Files of the durable tier, by folder descriptor: appear whole, are read in full, map the system's errors (R31).

Every function takes an open folder and one name, so that nothing between them can be swapped for a symbolic link.
`directory.py` puts them together.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from memstore.errors import CapacityError, ConfigError, IntegrityError, MemstoreError, TransportError

TEMP_PREFIX = ".tmp-"  # no job, step, part or marker starts with a dot
PROBE_TEXT = b"memstore"
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe left in the way must not hang the open
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_OURS = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}


@contextmanager
def mapped(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into the memstore error for it; memstore's own errors pass."""
    try:
        yield
    except MemstoreError:  # first: a PeerTimeout raised by the caller's chunks is an OSError too
        raise
    except OSError as exc:
        what = f"cannot {action} {path}: {exc.strerror} ({errno.errorcode.get(exc.errno or 0, 'no errno')})"
        if exc.errno in _FULL:
            raise CapacityError(f"{what}: free room there, or lower durable_keep", path=path) from exc
        if exc.errno in _REFUSED:
            raise ConfigError(f"{what}: give this user write access, or choose another `durable`", path=path) from exc
        if exc.errno in _NOT_OURS:
            raise IntegrityError(f"{what}: it is gone, or something else lies in its place", path=path) from exc
        raise TransportError(f"{what}: nothing is known about the bytes, it may be tried again", path=path) from exc


def write_file(folder: int, name: str, pieces: Sequence[bytes | memoryview], should_stop: Callable[[], bool]) -> bool:
    """Write `pieces` to a temporary file, sync it and put it in place; False if `should_stop` said so before that.

    Only a crash can leave a temporary file behind. Writers of one name do not meet: the last one wins.
    """
    temp = f"{TEMP_PREFIX}{name}-{secrets.token_hex(8)}"
    fd = os.open(temp, _WRITE_FLAGS, 0o600, dir_fd=folder)
    is_placed = False
    try:
        try:
            offset = 0
            for piece in pieces:
                if should_stop():
                    return False
                offset += write_all(fd, memoryview(piece), offset)
            os.fsync(fd)
            with suppress(OSError):  # advice: written pages count against the host's memory, beside the arena
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if should_stop():
            return False
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
        is_placed = True
    finally:
        if not is_placed:
            unlink_if_there(folder, temp)
    sync_folder(folder)
    return True


@contextmanager
def opened_file(folder: int, name: str, path: str) -> Iterator[tuple[int, int]]:
    """Open a plain file for reading; yields its descriptor and size. Links, pipes and folders are IntegrityErrors."""
    with mapped("read", f"{path}/{name}"):
        fd = os.open(name, _READ_FLAGS, dir_fd=folder)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise IntegrityError(f"{path}/{name} is not a plain file")
            yield fd, found.st_size
        finally:
            os.close(fd)


def read_all(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset`; an end of file before that is an IntegrityError."""
    done = 0
    while done < view.nbytes:
        got = os.preadv(fd, [view[done:]], offset + done)
        if not got:
            raise IntegrityError(f"the file ends at byte {offset + done}, {view.nbytes - done} more were promised")
        done += got


def write_all(fd: int, view: memoryview, offset: int) -> int:
    """Write all of `view` at `offset`; returns its size in bytes."""
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)
    return done


def sync_folder(folder: int) -> None:
    """Make the folder's entries durable, where its file system can."""
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems refuse it on folders
            raise


def unlink_if_there(folder: int, name: str) -> None:
    """Remove a file; that it is gone already is fine."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def rmdir_if_empty(folder: int, name: str) -> None:
    """Remove a folder; that it is gone or holds something that is not ours is fine."""
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def is_folder(folder: int, name: str) -> bool:
    """Say whether `name` is a folder itself, not a link to one."""
    with suppress(FileNotFoundError):
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False
