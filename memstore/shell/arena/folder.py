"""The private folder that holds one host's arena: made, checked and opened safely (R5).

    <arena_dir>/memstore-<uid>/<store>/<host>/
        lock         exclusive flock, and its owner          lock.py
        slots        header table of the arena               slot_headers.py
        arena        the bytes                               arena.py
        manifests/   the content of each shard               manifests.py
        journal      facts                                   journal_file.py
        secret       the store's secret
        holder.sock  the holder's Unix socket

Every level we make is 0700 and ours. `/dev/shm` is writable by everyone, so another user may have put a
link or a folder of that name there first: each level is checked, top down, before it is used. Once
a level is ours and closed, no other user can change what lies below it.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from memstore.config import commands_naming
from memstore.core.holder import succession
from memstore.errors import ConfigError
from memstore.shell.identity import read_boot_id

SECRET_NBYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def arena_folder(arena_dir: str | os.PathLike[str], *, store: str, host: str) -> Path:
    """Return the folder of one host of one store; touches nothing.

    Raises:
        ConfigError: A name that could leave the folder or is longer than 128 characters.
    """
    for what, name in (("store", store), ("host", host)):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{what} name {name!r} cannot be a folder name: use 1 to 128 letters, digits, '.', '_' or '-',"
                " the first a letter or digit"
            )
    return Path(os.path.realpath(arena_dir)) / f"memstore-{os.geteuid()}" / store / host


def make_folder(arena_dir: str | os.PathLike[str], *, store: str, host: str) -> Path:
    """Create the missing levels of a host's folder, check every level, return it.

    Raises:
        ConfigError: `arena_dir` is absent or unsafe, or a level is a link, not ours or open to others.
    """
    folder = arena_folder(arena_dir, store=store, host=host)
    levels = (folder.parent.parent, folder.parent, folder)
    for _ in range(100):  # a `destroy` in another process may remove an empty parent between two mkdirs
        try:
            check_root(folder.parent.parent.parent)
            for level in levels:
                if not os.path.lexists(level):
                    Path(level).mkdir(mode=0o700, exist_ok=True)
                check_level(level)
            return folder
        except FileNotFoundError:
            continue
    raise ConfigError(f"cannot create {folder}: its parents keep being removed by another process; stop it first")


def commands_for(folder: Path, text: str) -> str:
    """Return `text` with the store of a host's folder named in the `memstore` commands that it names."""
    return commands_naming(folder.parent.name, str(folder.parent.parent.parent), text)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder` if every level of it is a real folder, ours and closed to others.

    Raises:
        ConfigError: Names the level and what is wrong with it.
    """
    path = Path(folder)
    if not path.is_absolute() or path.parent.parent.name != f"memstore-{os.geteuid()}":
        raise ConfigError(
            f"{path} is not an arena folder of user {os.geteuid()}: want .../memstore-<uid>/<store>/<host>"
        )
    try:
        check_root(path.parent.parent.parent)
        for level in (path.parent.parent, path.parent, path):
            check_level(level)
    except FileNotFoundError as error:
        advice = commands_for(path, "run `memstore up`")
        raise ConfigError(f"there is no arena folder {path}: {error.filename} is missing; {advice}") from None
    return path


def open_file(folder: Path, name: str, flags: int) -> int:
    """Open (or, with O_CREAT, create 0600) a file of the folder without following links; return the fd.

    Raises:
        ConfigError: It is a link, not a regular file, not ours (but root may read it), or open to others.
        FileNotFoundError: It is not there and O_CREAT was not given.
    """
    path = folder / name
    try:
        # Emptied, if asked, only once it is known to be ours.
        fd = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}; {_remedy(error)}") from error
    is_roots_look = os.geteuid() == 0 and not flags & (os.O_WRONLY | os.O_RDWR)  # at an arena of any user
    problem = _problem(os.fstat(fd), wants_folder=False, may_be_others=is_roots_look)
    if problem:
        os.close(fd)
        raise ConfigError(f"refusing {path}: it {problem}; remove it if you know where it comes from")
    if flags & os.O_TRUNC:
        os.ftruncate(fd, 0)
    return fd


def _remedy(error: OSError) -> str:
    """Say what to do about a file that could not be opened."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has reached its limit of {limit:,} open files: raise it with `ulimit -n` and restart it"
    if error.errno == errno.ENFILE:
        return "this machine has reached its limit of open files: raise fs.file-max with sysctl"
    return "it must be a regular file of ours, mode 0600"


def is_at(path: Path, status: os.stat_result) -> bool:
    """Return whether the file of this status is the one at a path; False for any error on the way to it."""
    try:
        return os.path.samestat(os.lstat(path), status)
    except OSError:
        return False


def held_bytes(folder: Path) -> int:
    """Return the memory that the arena in a host's folder has; 0 if none is there, or it is just removed."""
    try:
        return os.stat(folder / "arena").st_blocks * 512
    except FileNotFoundError:
        return 0


def read_secret(folder: Path) -> bytes | None:
    """Return the store's secret kept in the folder, None if there is none (R4).

    Raises:
        ConfigError: The file is not 32 bytes long, or not ours alone.
    """
    try:
        fd = open_file(folder, "secret", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        secret = os.read(fd, SECRET_NBYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(
            f"{folder / 'secret'} has {len(secret)} bytes, want {SECRET_NBYTES}; remove it to get a new one"
        )
    return secret


def write_secret(folder: Path, secret: bytes) -> None:
    """Keep the store's secret, 32 bytes, mode 0600, so that it survives the controller (R4)."""
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(f"a store secret has {SECRET_NBYTES} bytes, got {len(secret)}")
    with suppress(ConfigError):  # a file that cannot be used is replaced
        if read_secret(folder) == secret:
            return  # the holder of before wrote it: a file system that is full keeps its successor from nothing
    temporary = f".secret-{os.getpid()}"
    fd = open_file(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, secret)
        os.rename(folder / temporary, folder / "secret")
    except OSError:
        (folder / temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def check_root(root: Path) -> None:
    """Raise ConfigError for an arena_dir where a stranger could swap our folder for another."""
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"arena_dir {root} is not a folder")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"arena_dir {root} belongs to user {status.st_uid}; want one of root's or user {os.geteuid()}'s"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"arena_dir {root} has mode {stat.S_IMODE(status.st_mode):04o}: others could replace the store's folder;"
            " set the sticky bit (chmod +t) or take a folder of your own"
        )


def check_level(level: Path) -> None:
    """Raise ConfigError unless `level` is a real folder, ours and closed to others."""
    problem = _problem(os.lstat(level), wants_folder=True)
    if problem:
        raise ConfigError(
            f"refusing {level}: it {problem}; remove it if you know where it comes from, or set arena_dir"
        )


def _problem(status: os.stat_result, *, wants_folder: bool, may_be_others: bool = False) -> str | None:
    """Say what makes a path unsafe to use, None if nothing does."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if wants_folder != stat.S_ISDIR(status.st_mode) or not (wants_folder or stat.S_ISREG(status.st_mode)):
        return "is not a folder" if wants_folder else "is not a regular file"
    if status.st_uid != os.geteuid() and not may_be_others:
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if not wants_folder and status.st_nlink > 1:
        return f"has {status.st_nlink} names: what is written here would appear elsewhere"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, open to others; want {'0700' if wants_folder else '0600'}"
    return None


# -- idle time ----------------------------------------------------------------------------------------
# The file that says when a holder was last here; what it says is decided in `core/holder/succession.py`.


SEEN_NAME = "seen"
_WIDTH = 80


class IdleTime:
    """Read once at a holder's start, then kept up while it runs. The caller holds the arena's lock."""

    def __init__(self, folder: Path) -> None:
        self._fd = open_file(folder, SEEN_NAME, os.O_RDWR | os.O_CREAT)
        self._boot, self._written_s = read_boot_id(), 0.0
        record = os.pread(self._fd, _WIDTH, 0).decode(errors="replace")
        self.idle_s = succession.idle_s(record, self._boot, time.monotonic())
        self.mark()

    def keep(self) -> None:
        """Write again that a holder is here, now and then."""
        if succession.is_due(self._written_s, time.monotonic()):
            self.mark()

    def mark(self) -> None:
        """Write that a holder is here now; in place, which needs no room."""
        self._written_s = time.monotonic()
        os.pwrite(self._fd, succession.record_of(self._boot, self._written_s).ljust(_WIDTH).encode(), 0)

    def close(self) -> None:
        """Write it for the last time."""
        self.mark()
        fd, self._fd = self._fd, -1  # a late caller must not write into another file of that number
        os.close(fd)


# -- incarnation --------------------------------------------------------------------------------------
# The number of a holder's life, in its host's folder: it only grows, and no clock has a part in it (R3).


INCARNATION_NAME = "incarnation"
FIRST_BITS = 48  # a folder that is new, or was lost, begins at random: no number of a former life comes twice
_NUMBER_WIDTH = 20


def next_incarnation(folder: Path, above: int = 0) -> int:
    """Take the number after the last life's, and after `above`, and keep it. The caller holds the arena's lock.

    It is written in place, in one call: that needs no room in a file system that is full.
    """
    fd = open_file(folder, INCARNATION_NAME, os.O_RDWR | os.O_CREAT)
    try:
        text = os.read(fd, _NUMBER_WIDTH)
        last = int(text) if len(text) == _NUMBER_WIDTH and text.isdigit() else secrets.randbits(FIRST_BITS)
        number = succession.following(last, above)
        os.pwrite(fd, f"{number:0{_NUMBER_WIDTH}d}".encode(), 0)
    finally:
        os.close(fd)
    return number
