"""OwnThreads: no key's work waits behind another's, and threads without work end."""

from __future__ import annotations

import threading

from memstore.shell.threads.waits import OwnThreads
from memstore.testing.clusters.processes import wait_for

NAME = "own-threads-test"


def named() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_a_key_that_hangs_holds_up_no_other_and_idle_threads_end() -> None:
    """All threads of one key wait; another key's work is done, in order, what raises among it."""
    threads, gate, done = OwnThreads(2, NAME), threading.Event(), list[int]()
    for _ in range(5):
        threads.submit("hangs", gate.wait)
    wait_for(lambda: len(named()) == 2, "both threads of the key that hangs")
    threads.submit("other", int, "no number")
    for number in range(20):
        threads.submit("other", done.append, number)
    wait_for(lambda: len(done) == 20, "the other key's work")
    wait_for(lambda: len(named()) == 2, "the other key's threads to end")
    gate.set()
    wait_for(lambda: not named(), "all threads to end")
    threads.submit("hangs", done.append, 20)
    wait_for(lambda: 20 in done, "work of a key whose threads had ended")
    threads.close()


def test_after_close_nothing_is_begun() -> None:
    """What waits behind work under way is dropped, and so is what comes later."""
    threads, gate, done = OwnThreads(1, NAME), threading.Event(), list[int]()
    began = threading.Event()
    threads.submit("key", lambda: (began.set(), gate.wait()))
    threads.submit("key", done.append, 1)
    began.wait(30.0)
    threads.close()
    threads.submit("key", done.append, 2)
    threads.submit("new", done.append, 3)
    gate.set()
    wait_for(lambda: not named(), "the thread to end")
    assert not done
