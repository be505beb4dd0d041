"""Faults that last only while a thread keeps them up. The thread also undoes them, however the drill ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from memstore.errors import DrillError

END_S = 20.0
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # from linux/fs.h; the calls of fsfreeze -f and -u
FILL_STEPS_BYTES = (
    64 << 20,
    1 << 20,
    4096,
)  # largest first; the last is a page, the least that a file system gives out


class KeptUp:
    """A fault with a thread of its own, which calls `work` again and again until `end`, and then `undo`."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="drill-fault", daemon=True)

    def work(self) -> None:
        """Do one round; wait only on `stopping`, and for two seconds at most."""
        raise NotImplementedError

    def undo(self) -> None:
        """Remove everything of the fault; called once, after the last round."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, which undoes the fault; a second call does nothing.

        Raises:
            DrillError: the fault could not be kept up or undone.
        """
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
    """A file system that is frozen for most of the time, so that every write waits for the next thaw."""

    def __init__(self, folder: Path, *, frozen_s: float = 1.0, thawed_s: float = 0.1) -> None:
        super().__init__()
        self.frozen_s, self.thawed_s = frozen_s, thawed_s
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def work(self) -> None:
        """Freeze the file system, wait, thaw it, wait."""
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
    """A file that takes all free space of a file system, also the space that becomes free later."""

    AGAIN_S = 0.02

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / ".drill-filler"
        self.nbytes = 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def start(self) -> None:
        """Fill the file system, then start the thread."""
        self._fill()
        super().start()

    def work(self) -> None:
        """Take the space that has become free."""
        self._fill()
        self.stopping.wait(self.AGAIN_S)

    def end(self) -> None:
        """Stop the thread and remove the file."""
        super().end()
        with contextlib.suppress(FileNotFoundError):  # if the thread never started, the file is still there
            self.path.unlink()

    def undo(self) -> None:
        """Remove the file."""
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
        """Return whether so many bytes are free; always true for one page.

        If a request fails for lack of space, tmpfs has taken all free space for a moment; so ask only for what fits.
        """
        free = os.fstatvfs(self._fd)
        return nbytes == FILL_STEPS_BYTES[-1] or nbytes <= free.f_bfree * free.f_frsize
