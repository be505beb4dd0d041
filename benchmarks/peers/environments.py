"""An environment for each peer: made once from its pinned requirements, made again when they change.

All share the torch of the environment that runs this (a .pth file behind their own packages): it is the same
release, and five copies of it would take gigabytes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".peers"  # ignored by git
INSTALL_S = 600.0


class CannotInstall(Exception):
    """An environment could not be made; the text is the last line that said why."""


def interpreter(name: str) -> Path:
    """Return the Python of a peer's environment, which is made if it is missing or its pins changed.

    Raises:
        CannotInstall: pip or venv failed, or took longer than INSTALL_S.
    """
    if name == "memstore":
        return Path(sys.executable)
    pins = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    home = FOLDER / name
    python, stamp = home / "bin" / "python", home / "pins.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(home)])
    shared = sysconfig.get_paths()["purelib"]
    (next(home.glob("lib/python3*/site-packages")) / "zz_shared.pth").write_text(shared + "\n", encoding="utf-8")
    _run([str(python), "-m", "pip", "install", "-q", "-r", str(HERE / f"{name}.txt")])
    stamp.write_text(pins, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise CannotInstall(lines[-1] if lines else f"exit status {done.returncode}")
