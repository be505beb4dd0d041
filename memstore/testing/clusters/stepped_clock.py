"""A wall clock that is off; the process's monotonic clock is right."""

from __future__ import annotations

import os
import time
from pathlib import Path

CLOCK_VARIABLE = "STEPPED_CLOCK_S"
_SITE = f"""import os
from {__name__} import shift_clock

shift_clock(float(os.environ["{CLOCK_VARIABLE}"]))
"""


def stepped_clock(folder: Path, step_s: float) -> dict[str, str]:
    """Return the environment that sets a Python process's wall clock `step_s` ahead; write its files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    path = [str(folder), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), CLOCK_VARIABLE: str(step_s)}


def shift_clock(seconds: float) -> None:
    """Shift the wall clock of this process."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
