"""A rehearsal: a fresh process builds the training state, takes a stored step, and says what would not come back.

    the step's bytes --file--> child: build() --filled from the file--> laid out again --compared by path--> verdict
                                                '--step()--> its loss, compared with the loss of the unbroken run

The child is a process of its own, started by name: nothing of this process reaches it but the file. It ends with this
process, whose end it sees at its stdin.
"""

from __future__ import annotations

import _thread
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from memstore.core.format.layout import decode_layout
from memstore.core.format.manifest import chunk_sizes
from memstore.errors import ConfigError, LoadError, MemstoreError, PeerTimeout
from memstore.shell.codec.decode import build_state, decode_state, matched
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.rank.launch import REHEARSAL_VARIABLE
from memstore.shell.rank.shard_read import ShardRead
from memstore.shell.tensors.slot_stream import SlotStream
from memstore.shell.threads import SafeEvent

log = logging.getLogger("memstore")
CHUNK_BYTES = 4 << 20
PATHS_SHOWN = 20
LOOK_S = 0.02
ENDING_S = 5.0  # for a thread that was asked to end
STDIN, STDERR = 0, 2
LAUNCH_VARIABLES = (  # a child that had them would join the process group of this launch
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)
Step = Callable[[], Any]


@dataclass(frozen=True)
class Rehearsal:
    """What a fresh process makes of a step.

    Attributes: differs (paths whose values would not come back, with what is there instead), not_filled (paths for
    which the fresh state has no place), error (of build() or of the load, by its class; "": none), loss and
    expected_loss (of the step that follows, as `float.hex`; None: not trained).
    """

    differs: tuple[str, ...] = ()
    not_filled: tuple[str, ...] = ()
    error: str = ""
    loss: str | None = None
    expected_loss: str | None = None

    @property
    def is_equal(self) -> bool:
        """Return whether a restart would go on as if nothing had happened, as far as this shows."""
        is_loss_equal = None in (self.loss, self.expected_loss) or self.loss == self.expected_loss
        return not (self.differs or self.not_filled or self.error) and is_loss_equal

    def __str__(self) -> str:
        if self.is_equal:
            trained = f", and its next loss is equal ({self.loss})" if self.loss and self.expected_loss else ""
            return f"a fresh process takes this step: every value comes back{trained}"
        lines = [self.error] if self.error else []
        lines += [f"does not come back: {path}" for path in self.differs[:PATHS_SHOWN]]
        lines += [f"has no place in what build() makes: {path}" for path in self.not_filled[:PATHS_SHOWN]]
        if not lines:
            lines = [
                f"the next loss is {self.loss}, and {self.expected_loss} without a restart: something that "
                "training uses is not in the state, such as random state or the position in the data"
            ]
        return "a fresh process does not take this step:\n  " + "\n  ".join(lines)


def target_of(build: Callable[[], Any] | str) -> str:
    """Return "FILE.py:NAME" or "MODULE:NAME" of a function that another process can import. ConfigError if none can."""
    if isinstance(build, str):
        return build
    name, module = getattr(build, "__qualname__", ""), getattr(build, "__module__", "")
    if not name or not module or "<" in name:
        raise ConfigError(
            f"rehearse() needs a function that a fresh process can import, and {build!r} is none: define build() at "
            "the top level of a file"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{Path(file).resolve()}:{name}" if module == "__main__" and file else f"{module}:{name}"


class FirstRehearsal:
    """Rehearses the first step that a rank puts, in a thread beside the training: `connect(rehearse=)`.

    Its verdict is in the log: a warning with the paths unless every value comes back.
    """

    def __init__(self, job: str, target: str) -> None:
        self._job, self._target = job, target
        self._over: SafeEvent | None = None  # of its thread; None: it has not begun
        self._ending = SafeEvent()

    def begin(self, step: int, rehearse: Callable[[int, str, threading.Event], Rehearsal]) -> None:
        """Start at the first put; later calls do nothing, also if an exception ended the first one."""
        if self._over is None:
            over = SafeEvent()
            try:
                self._over = over
                _thread.start_new_thread(self._run, (over, step, rehearse))
            except BaseException:
                over.set()
                raise

    def wait(self, timeout_s: float) -> bool:
        """Return whether nothing is under way, at the latest after `timeout_s`."""
        return self._over is None or self._over.wait(timeout_s)

    def close(self) -> None:
        """End the rehearsal that is under way, with its process."""
        self._ending.set()
        self.wait(ENDING_S)

    def _run(self, over: SafeEvent, step: int, rehearse: Callable[[int, str, threading.Event], Rehearsal]) -> None:
        try:
            found = rehearse(step, self._target, self._ending)
        except (MemstoreError, OSError) as error:
            what = "was cut short by close()" if self._ending.is_set() else f"could not be done: {error}"
            log.warning("memstore %s: the rehearsal of step %d with %s %s", self._job, step, self._target, what)
        else:
            level = logging.INFO if found.is_equal else logging.WARNING
            log.log(level, "memstore %s: rehearsal of step %d: %s", self._job, step, found)
        finally:
            over.set()


def rehearse_stored(
    read: ShardRead, target: str, loss: float | None, timeout_s: float, ending: threading.Event | None = None
) -> Rehearsal:
    """Rehearse one rank's stored shard.

    Args:
        read: Of the shard; its bytes are verified as they are copied.
        target: The function, as `target_of` names it.
        loss: Of the training step that followed the put; None: unknown, so it is not compared.
        timeout_s: Of the fresh process.
        ending: Once it is set, the fresh process is ended.
    """
    manifest = read.manifest()
    with tempfile.TemporaryDirectory(prefix="memstore-rehearsal-") as folder:
        with (Path(folder) / "bytes").open("wb") as file:
            at = 0
            for nbytes in chunk_sizes(manifest.nbytes, manifest.chunk_bytes):
                file.write(read.bytes_of([(at, nbytes)])[0])
                at += nbytes
        (Path(folder) / "layout").write_bytes(manifest.layout)
        found = _child("second", Path(folder), target, 0, timeout_s, ending)
    expected = None if loss is None else float(loss).hex()
    return msgspec.convert({**found, "expected_loss": expected}, Rehearsal)


def rehearse_alone(target: str, steps: int, timeout_s: float) -> Rehearsal:
    """Rehearse without a store: one fresh process builds and trains, another one takes what it had then.

    Args:
        target: The function: it returns the state, or the state and a function that trains one step.
        steps: So many steps are trained before the state is laid out.
        timeout_s: Of each process.
    """
    with tempfile.TemporaryDirectory(prefix="memstore-rehearsal-") as folder:
        first = _child("first", Path(folder), target, steps, timeout_s)
        if first["error"]:
            return Rehearsal(error=first["error"])
        second = _child("second", Path(folder), target, steps, timeout_s)
    return msgspec.convert({**second, "expected_loss": first["loss"]}, Rehearsal)


def _child(
    part: str, folder: Path, target: str, steps: int, timeout_s: float, ending: threading.Event | None = None
) -> dict[str, Any]:
    """Run one process of a rehearsal to its end; with it ends all that it started."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    env[REHEARSAL_VARIABLE] = target
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    command = [sys.executable, "-m", "memstore.client.rehearsal", part, str(folder), target, str(steps)]
    # What the user's code prints is no data of ours: it goes to stderr.
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=STDERR, start_new_session=True) as process:
        try:
            is_over = _has_ended(process.pid, timeout_s, ending or threading.Event())
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the number is still that of its group
            code = process.wait()
    if not is_over:
        raise PeerTimeout(
            f"the fresh process of the rehearsal of {target} has not ended after {timeout_s:g} s: raise timeout_s, or "
            "look what build() waits for. Its process group is ended.",
            operation="rehearse",
            limit_s=timeout_s,
        )
    result = folder / f"{part}.json"
    if not result.exists():
        return {"error": f"the fresh process ended with code {code} before it had a result: see what it printed"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _has_ended(pid: int, timeout_s: float, ending: threading.Event) -> bool:
    """Wait for the end of a child without reaping it; False if it lives on at the deadline, or once `ending` is set."""
    until_s = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > until_s or ending.wait(LOOK_S):
            return False
    return True


# -- in the fresh process -----------------------------------------------------------------------------


def main(part: str, folder: str, target: str, steps: str) -> None:
    """Do one half of a rehearsal, and leave its result in a file."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    play = {"first": _first, "second": _second}[part]
    try:
        found = play(Path(folder), target, int(steps))
    except MemstoreError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        found = {"error": f"build() of {target} raised {type(error).__name__}: {error}"}
    Path(folder, f"{part}.json").write_text(json.dumps({"error": "", **found}))


def _end_with_parent() -> None:
    # Nothing is written there: it is closed when the other process ends. A read through sys.stdin would hold a lock
    # that the interpreter wants at its end, so that the process would abort instead.
    os.read(STDIN, 1)
    os.killpg(0, signal.SIGKILL)


def _first(folder: Path, target: str, steps: int) -> dict[str, Any]:
    state, step = _built(target)
    for _ in range(steps if step is not None else 0):
        step()  # type: ignore[misc]
    _lay_out(state, folder)
    return {"loss": _loss_of(step)}


def _second(folder: Path, target: str, steps: int) -> dict[str, Any]:
    layout, data = decode_layout((folder / "layout").read_bytes()), bytearray((folder / "bytes").read_bytes())
    state, step = _built(target)
    match = matched(layout, state)
    build_state(layout, SlotStream(_views(data), CHUNK_BYTES, len(data)), match)
    again = folder / "again"
    again.mkdir()
    _lay_out(state, again)
    differs = list(differing(_plain(folder), _plain(again)))
    not_filled = match.plain.not_filled if match is not None else []
    return {"differs": differs, "not_filled": list(not_filled), "loss": _loss_of(step)}


def _built(target: str) -> tuple[Any, Step | None]:
    where, _, name = target.rpartition(":")
    if not where:
        raise ConfigError(f"{target!r} names no function: write FILE.py:NAME or MODULE:NAME")
    found: Any = _file_as_module(where) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{where} has no function {name!r}")
    built = found()
    if isinstance(built, tuple) and len(built) == 2 and callable(built[1]):
        return built
    return built, None


def _file_as_module(file: str) -> ModuleType:
    """Import a file under its own name, so that `if __name__ == "__main__"` in it does not run."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigError(f"there is no Python file {file!r}: name it from the current folder, as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _loss_of(step: Step | None) -> str | None:
    if step is None:
        return None
    loss = step()
    try:
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss).hex()
    except TypeError:
        raise ConfigError("step() of a rehearsal must return the loss, as a number") from None


def _views(data: bytearray) -> list[memoryview]:
    return [memoryview(data)[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def _lay_out(state: Any, folder: Path) -> None:
    plan = plan_state(state)
    data = bytearray(plan.nbytes)
    copy_into(plan, _views(data), CHUNK_BYTES)
    (folder / "layout").write_bytes(plan.layout)
    (folder / "bytes").write_bytes(data)


def _plain(folder: Path) -> Any:
    """Return the laid-out state as new plain objects and tensors."""
    layout, data = (folder / "layout").read_bytes(), bytearray((folder / "bytes").read_bytes())
    try:
        return decode_state(layout, _views(data), CHUNK_BYTES)
    except MemstoreError as error:
        raise LoadError(f"the state cannot be compared value by value: {error}") from error


def differing(stored: Any, fresh: Any, path: str = "state") -> Iterator[str]:
    """Give the paths at which two plain states differ in type, shape, bits or entries, each with both sides."""
    if isinstance(stored, torch.Tensor) and isinstance(fresh, torch.Tensor):
        if (stored.dtype, stored.shape) != (fresh.dtype, fresh.shape):
            yield f"{path}: {stored.dtype} {list(stored.shape)} was put, {fresh.dtype} {list(fresh.shape)} is there"
        elif _bits(stored) != _bits(fresh):
            yield f"{path}: its values differ"
    elif isinstance(stored, np.ndarray) and isinstance(fresh, np.ndarray):
        if (stored.dtype, stored.shape, stored.tobytes()) != (fresh.dtype, fresh.shape, fresh.tobytes()):
            yield f"{path}: its values differ"
    elif isinstance(stored, Mapping) and isinstance(fresh, Mapping):
        for key in dict.fromkeys((*stored, *fresh)):
            where = f"{path}[{key!r}]"
            if key in stored and key in fresh:
                yield from differing(stored[key], fresh[key], where)
            else:
                yield f"{where}: {'is not there' if key in stored else 'was not put'}"
    elif isinstance(stored, list | tuple) and isinstance(fresh, list | tuple) and len(stored) == len(fresh):
        for number, (one, other) in enumerate(zip(stored, fresh, strict=True)):
            yield from differing(one, other, f"{path}[{number}]")
    elif type(stored) is not type(fresh) or repr(stored) != repr(fresh):
        yield f"{path}: {repr(stored)[:80]} was put, {repr(fresh)[:80]} is there"


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


if __name__ == "__main__":
    main(*sys.argv[1:])
