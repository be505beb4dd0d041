"""Faults that last only while somebody keeps them up: a thread does, and undoes them however the drill ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from memstore.errors import DrillError

END_S = 20.0
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h: what fsfreeze -f and -u do
FILL_STEPS_BYTES = (64 << 20, 1 << 20, 4096)  # largest first; the last is a page, less than which nobody is given


class KeptUp:
    """A fault in a thread of its own: `work` again and again until `end`, then `undo`."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="drill-fault", daemon=True)

    def work(self) -> None:
        """One round; waits on `stopping`, never longer than a second or two."""
        raise NotImplementedError

    def undo(self) -> None:
        """Leave nothing of the fault; called once, after the last round."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Stop and undo it; a second call does nothing. DrillError if it could not be kept up or undone."""
        self.stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout=END_S)
        if self._thread.is_alive():
            raise DrillError(f"{type(self).__name__} did not end within {END_S:g} s")
        if self.error is not None:
            raise DrillError(f"{type(self).__name__} was not kept up: {self.error}") from self.error

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.work()
        except Exception as exc:
            self.error = exc
        finally:
            self.undo()


class SlowFileSystem(KeptUp):
    """A file system that is frozen for most of the time: every write waits for the next moment in which it is not."""

    def __init__(self, folder: Path, *, frozen_s: float = 1.0, thawed_s: float = 0.1) -> None:
        super().__init__()
        self.frozen_s, self.thawed_s = frozen_s, thawed_s
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def work(self) -> None:
        """One cycle, which ends thawed."""
        fcntl.ioctl(self._fd, FIFREEZE, 0)
        try:
            self.stopping.wait(self.frozen_s)
        finally:
            fcntl.ioctl(self._fd, FITHAW, 0)
        self.stopping.wait(self.thawed_s)

    def undo(self) -> None:
        """Close the folder, so that it can be unmounted."""
        os.close(self._fd)


class FullFileSystem(KeptUp):
    """A file that takes all the room a file system has, and again what others give back."""

    AGAIN_S = 0.02

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / ".drill-filler"
        self.nbytes = 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def start(self) -> None:
        """Full when this returns."""
        self._fill()
        super().start()

    def work(self) -> None:
        """Take what has become free."""
        self._fill()
        self.stopping.wait(self.AGAIN_S)

    def end(self) -> None:
        """Give all of it back."""
        super().end()
        with contextlib.suppress(FileNotFoundError):  # it never began: nobody undid it
            self.path.unlink()

    def undo(self) -> None:
        """Give all of it back."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _fill(self) -> None:
        for step in FILL_STEPS_BYTES:
            try:
                while not self.stopping.is_set() and self._may_fit(step):
                    os.posix_fallocate(self._fd, self.nbytes, step)
                    self.nbytes += step
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise

    def _may_fit(self, nbytes: int) -> bool:
        """No more than is free, if it is not one page: tmpfs takes what there is and gives it back when it ends."""
        free = os.fstatvfs(self._fd)
        return nbytes == FILL_STEPS_BYTES[-1] or nbytes <= free.f_bfree * free.f_frsize
