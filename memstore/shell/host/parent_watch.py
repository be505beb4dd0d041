"""A process that Ray started ends when its raylet does (R3).

Ray leaves actors behind for a minute or more when their raylet is killed. Ray calls such an actor dead, so nothing can
stop it any more; the host's next holder finds an arena that is served by a process outside the cluster.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger("memstore")
POLL_S = 0.5


def end_with_parent(exit_now: Callable[[int], object] = os._exit) -> threading.Thread:
    """Watch the process that started this one, and exit with code 1 once it is gone; the arena outlives both (R2)."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        log.warning("the raylet (pid %d) that started this process has died: it ends too", parent)
        exit_now(1)

    thread = threading.Thread(target=watch, name="memstore-raylet-watch", daemon=True)
    thread.start()
    return thread
