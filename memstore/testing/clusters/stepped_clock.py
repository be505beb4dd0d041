"""A wall clock that is off, for a process that is yet to start; its monotonic clock is right."""

from __future__ import annotations

from pathlib import Path

_SITE = """import os
import time

_step_s = float(os.environ["STEPPED_CLOCK_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _step_s
time.time_ns = lambda: _time_ns() + int(_step_s * 1e9)
"""


def stepped_clock(folder: Path, step_s: float) -> dict[str, str]:
    """Return the environment that sets a Python process's wall clock `step_s` ahead; write its files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": str(folder), "STEPPED_CLOCK_S": str(step_s)}
