"""Durable storage of a round: none, a directory, or an object store's server behind a layer that fails on request."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from memstore.testing.faults.object_servers import CLOUDS, HttpFaults, ObjectServer


class NemesisStorage:
    """The storage of a round, a context manager; `url` is the value of `durable=`, None for none."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.url: str | None = None
        self.environment: dict[str, str] = {}
        self.faults: HttpFaults | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> NemesisStorage:
        if self.kind == "directory":
            self.place = self.folder / "durable"
            self.place.mkdir(parents=True)
            self.url = str(self.place)
        elif self.kind in CLOUDS:
            self.folder.mkdir(parents=True, exist_ok=True)
            server = self._stack.enter_context(ObjectServer(self.kind, self.folder))
            self.faults = self._stack.enter_context(HttpFaults(server))
            self.faults.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up
            self.environment = self.faults.environment()
            self.url = f"{server.url}/checkpoints"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def damage(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Break the storage; return what was done and the function that undoes it."""
        if self.faults is not None:
            return self._damage_objects(self.faults, rng)
        if self.kind != "directory" or not self.place.is_dir():
            return "nothing (it is away already)", lambda: None
        aside = self.place.with_name("durable-aside")
        self.place.rename(aside)
        is_file = rng.random() < 0.5
        if is_file:
            self.place.write_text("not a directory")

        def restore() -> None:
            if not aside.exists():
                return
            if self.place.is_file():
                self.place.unlink()
            elif self.place.is_dir():  # steps that were written meanwhile are lost with the wrong mount
                self.place.rename(self.place.with_name(f"durable-wrong-{rng.getrandbits(32)}"))
            aside.rename(self.place)

        return f"the directory is {'a file' if is_file else 'away'}", restore

    def empty(self) -> bool:
        """Remove everything from a directory; False for other kinds."""
        if self.kind != "directory":
            return False
        for path in self.place.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return True

    def _damage_objects(self, faults: HttpFaults, rng: random.Random) -> tuple[str, Callable[[], None]]:
        method = rng.choice(("PUT", "PUT", "GET", "DELETE"))
        kind = rng.choice(("status", "hang-up", "lose-reply", "reset", "wait"))
        rule = faults.add(method, "", kind=kind, times=rng.choice((1, 5, 50)), status=rng.choice((500, 503, 403)))

        def restore() -> None:
            rule.times = 0
            rule.gate.set()

        return f"{self.kind}: {rule.times} {method} requests: {kind} {rule.status if kind == 'status' else ''}", restore
