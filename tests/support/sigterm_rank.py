"""Ranks that wait for SIGTERM, each in a way of its own; run by `test_persist.py`.

This process has imported everything and forks a rank for each line of stdin, a wish in JSON: it says the rank's pid,
and for an empty line waits for its end and says its exit code. A rank says "ready" once step 60 is committed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Any

import torch

import memstore
from memstore.config import Config

STEP_S = 0.01  # of a training that only waits


def say(word: str) -> None:
    """Tell the test."""
    os.write(1, f"{word}\n".encode())


def former(number: int, frame: FrameType | None) -> None:
    """A handler that was there before the store."""
    say("former")
    sys.exit(7)


def counted(number: int, frame: FrameType | None) -> None:
    """One that lets training go on."""
    say("former")


def wait() -> None:
    """Train."""
    while True:
        time.sleep(STEP_S)


def hang() -> None:
    """Be in C code that no signal interrupts, as in a collective whose peers are gone."""
    mutex = ctypes.create_string_buffer(256)  # as PTHREAD_MUTEX_INITIALIZER
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def fork_and_end() -> None:
    """Children that are forked and ended at once are no end of this process."""
    for _ in range(50):
        child = multiprocessing.get_context("fork").Process(target=wait)
        child.start()
        child.terminate()
        child.join()
        if child.exitcode != -signal.SIGTERM:
            say(f"a child ended with {child.exitcode}")
    say("forked")
    wait()


def train(wish: dict[str, Any]) -> memstore.Store:
    """Connect and put steps 0 to 60."""
    config = Config(durable_every=1000, replicas=1, **wish["config"])
    store = memstore.connect(wish["job"], rank=0, world_size=1, attempt="1", config=config)
    for step in range(61):
        store.put(step, {"w": torch.full((1024,), float(step))}, timeout_s=30.0).wait("committed", 30.0)
    say("ready")
    return store


async def handle_sigterm(wish: dict[str, Any]) -> None:
    """Be an event loop that learns SIGTERM itself, through a descriptor that was set before the store's."""
    is_signalled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_signalled.set)
    train(wish)
    await is_signalled.wait()
    say("former")


def close(store: memstore.Store) -> None:
    """Leave the job before the signal."""
    store.close()
    if (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) != (signal.SIG_DFL, -1):
        say("something was left behind")
    say("closed")
    wait()


def be_rank(wish: dict[str, Any]) -> None:
    """Do as wished."""
    for fd, name in ((1, "said"), (2, "log")):
        os.dup2(os.open(f"{wish['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    logging.basicConfig(level=logging.INFO, stream=os.fdopen(2, "w"))
    way = wish["way"]
    if way == "loop":
        asyncio.run(handle_sigterm(wish))
        return
    handlers = {"former": former, "counted": counted, "ignored": signal.SIG_IGN}
    if way in handlers:
        signal.signal(signal.SIGTERM, handlers[way])
    store = train(wish)
    if way == "closed":
        close(store)
    {"hung": hang, "forked": fork_and_end}.get(way, wait)()


def main() -> None:
    """Fork ranks until the test hangs up."""
    pid = 0
    for line in sys.stdin:
        if not line.strip():
            say(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                be_rank(json.loads(line))
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        say(str(pid))


if __name__ == "__main__":
    main()
