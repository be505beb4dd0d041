"""One holder per arena: an exclusive flock held for life, and the owner's name in it (R2, R5, R8).

The lock is the kernel's, so it ends with its owner, however the owner ends. The file's text
(pid, start time, machine, cluster, address) is for people and for replacing a frozen owner; it is
cleared on a clean release. No lock, no service.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memstore.errors import ConfigError
from memstore.shell.arena.folder import check_folder, commands_for, is_at, open_file

LOCK_NAME = "lock"
_RECORD_NBYTES = 2048  # fixed, written in one call: a reader never sees half of a shorter record
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that wrote itself into a lock file, as a value."""

    pid: int
    start_time: int  # field 22 of /proc/<pid>/stat: clock ticks after boot
    boot_id: str
    pid_namespace: int  # inode of /proc/self/ns/pid: a pid means nothing in another container
    cluster: str = ""  # id or address of its Ray cluster
    address: str = ""  # where it listens

    def is_alive(self) -> bool:
        """Say whether this very process lives; one of another pid namespace counts as alive."""
        if self.boot_id != boot_id():
            return False
        return self.pid_namespace != pid_namespace() or is_alive(self.pid, self.start_time)


_OWNER = msgspec.json.Decoder(LockOwner)  # made once, by the thread that imports: see core/wire/codec.py


class ArenaLock:
    """The exclusive lock on one arena folder; held until `release` or the end of the process."""

    def __init__(self, folder: Path, fd: int, owner: LockOwner) -> None:
        self.folder = folder
        self._fd = fd
        self._owner = owner
        _HELD.add(self)

    @classmethod
    def take(
        cls,
        folder: str | os.PathLike[str],
        *,
        timeout_s: float,
        cluster: str = "",
        address: str = "",
        replace_frozen: Callable[[LockOwner], bool] | None = None,
    ) -> ArenaLock:
        """Take the lock, replacing an owner that has stopped answering (R2).

        Args:
            folder: An arena folder that exists.
            timeout_s: How long to wait for a lock that its owner is giving up.
            cluster: Written beside the pid, for the error of a holder that is refused.
            address: Written beside the pid, for the error of a holder that is refused.
            replace_frozen: Called with the live owner; True means it is stopped or does not answer,
                and exactly that process is killed. None: a live owner is never killed.

        Raises:
            ConfigError: A live owner keeps the lock, or it was not given up in time.
        """
        path = check_folder(folder)
        me = LockOwner(os.getpid(), process_start_time(os.getpid()) or 0, boot_id(), pid_namespace(), cluster, address)
        deadline_s = time.monotonic() + timeout_s
        killed: LockOwner | None = None
        while True:
            fd = _try_lock(path)
            if fd is not None:
                lock = cls(path, fd, me)
                lock._write()
                return lock
            holding = owner(path)
            # No record, or a dead one: the owner is just coming or going, so the lock moves by itself.
            if holding is not None and holding != killed and holding.is_alive():
                if replace_frozen is None or not replace_frozen(holding):
                    raise ConfigError(_refusal(path, holding), owner=holding)
                _kill_exactly(path, holding)
                killed = holding
            if time.monotonic() >= deadline_s:
                who = f"pid {holding.pid}" if holding else "an unnamed process"
                raise ConfigError(f"the lock of {path} was not given up within {timeout_s:g} s; last owner: {who}")
            time.sleep(_POLL_S)

    def describe(self, *, cluster: str = "", address: str = "") -> None:
        """Rewrite the lock file's text for other processes, once the holder knows its address."""
        now = self._owner
        self._owner = LockOwner(now.pid, now.start_time, now.boot_id, now.pid_namespace, cluster, address)
        self._write()

    def is_current(self) -> bool:
        """Say whether the file that is locked is the one that others would lock."""
        return _is_current(self.folder, self._fd)

    def fileno(self) -> int:
        """Return the locked file; a process that has it open as well keeps the lock from others until it ends."""
        return self._fd

    def release(self) -> None:
        """Clear the record and give the lock up; a second call does nothing."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            self._close()

    def _write(self) -> None:
        record = msgspec.json.encode(self._owner)
        if len(record) > _RECORD_NBYTES:
            raise ConfigError(f"cluster and address make a lock record of {len(record)} bytes, limit {_RECORD_NBYTES}")
        os.pwrite(self._fd, record.ljust(_RECORD_NBYTES), 0)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        _HELD.discard(self)
        if fd >= 0:
            os.close(fd)


def owner(folder: str | os.PathLike[str]) -> LockOwner | None:
    """Return the owner that the lock file names last, None if it names none; takes no lock.

    The process may be gone: ask `is_alive()`, or `is_held(folder)`.
    """
    try:
        fd = open_file(Path(folder), LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        text = os.pread(fd, _RECORD_NBYTES, 0)
    finally:
        os.close(fd)
    try:
        return _OWNER.decode(text)
    except msgspec.MsgspecError:
        return None


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Say whether some process holds the lock of the folder now."""
    try:
        fd = open_file(Path(folder), LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def process_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if there is none (proc(5), field 22)."""
    status = _process_status(pid)
    return status[1] if status else None


def is_alive(pid: int, start_time: int) -> bool:
    """Say whether the process that had `pid` and `start_time` still runs; a zombie does not (R8, R20)."""
    status = _process_status(pid)
    return status is not None and status[0] not in "ZXx" and status[1] == start_time


def boot_id() -> str:
    """Return the id the kernel drew at this boot: the identity of the machine (R1)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace: pids compare only inside one."""
    return os.stat("/proc/self/ns/pid").st_ino


def _process_status(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 1 :].split()  # the command name may hold spaces and brackets
    return fields[0], int(fields[19])


def _try_lock(folder: Path) -> int | None:
    """Return the fd of the locked file, None if another process holds it."""
    while True:
        fd = open_file(folder, LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(folder, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        os.close(fd)  # a `destroy` unlinked this file between open and flock: lock the new one


def _is_current(folder: Path, fd: int) -> bool:
    return is_at(folder / LOCK_NAME, os.fstat(fd))


def _kill_exactly(folder: Path, victim: LockOwner) -> None:
    """Kill the frozen owner and no other process: the pidfd pins the process before it is checked (R2)."""
    if victim.pid_namespace != pid_namespace():
        raise ConfigError(
            _refusal(folder, victim) + " (it runs in another container, so it cannot be replaced from here)"
        )
    try:
        pidfd = os.pidfd_open(victim.pid)
    except ProcessLookupError:
        return
    try:
        if not is_alive(victim.pid, victim.start_time):
            return
        uid = _process_uid(victim.pid)
        if uid is not None and uid != os.geteuid():
            raise ConfigError(_refusal(folder, victim) + f" (it runs as user {uid}, not {os.geteuid()})")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _process_uid(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[2]) for line in lines if line.startswith("Uid:")), None)


def _refusal(folder: Path, holding: LockOwner) -> str:
    """Name the owner and the way out (R5)."""
    way_out = commands_for(folder, "stop that store first (`memstore down` on its cluster)")
    return (
        f"{folder} is held by live pid {holding.pid} at {holding.address or 'no address'} of Ray cluster "
        f"{holding.cluster or 'unknown'}; {way_out} or start yours under another name (Config.store)"
    )


def _close_in_child() -> None:
    # An inherited fd would keep the flock alive after its owner died.
    for lock in list(_HELD):
        lock._close()


_HELD: weakref.WeakSet[ArenaLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
