"""Install the wheel beside chosen versions of Python, torch and Ray, and put and get once: the table of what works.

    matrix.py WHEEL [PYTHON:TORCH:RAY ...]

Each row gets an environment of its own, one after the other, which is removed again: some 6 GB where torch comes with
CUDA. A Python is looked for as `pythonX.Y` on the path and among pyenv's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = (
    *(f"3.{minor}:2.13.0:2.60.0" for minor in (10, 11, 12, 13)),
    "3.11:2.6.0:2.49.0",
    "3.11:2.6.0:2.60.0",
    "3.11:2.13.0:2.49.0",
    "3.13:2.6.0:2.49.0",
)
INSTALL_S, SMOKE_S = 900.0, 300.0


def interpreter(version: str) -> str | None:
    """Return the path of a Python of this minor version; None if there is none here."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(homes[-1]) if homes else shutil.which(f"python{version}")


def last_line(output: str) -> str:
    """Return the last line that says something, short enough for a table."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    return re.sub(r"\s+", " ", lines[-1])[:160] if lines else "no output"


def run(command: list[str], folder: Path, limit_s: float) -> tuple[bool, str]:
    """Run a command; return whether it ended well, and what it said last."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "RAY_USAGE_STATS_ENABLED": "0"},
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {limit_s:g} s"
    is_well = done.returncode == 0
    return is_well, last_line(done.stdout if is_well else done.stdout + done.stderr)


def play(wheel: Path, row: str) -> tuple[str, str]:
    """Return whether a row works, and what was said last."""
    python, torch, ray = row.split(":")
    found = interpreter(python)
    if found is None:
        return "not run", f"no Python {python} here"
    with tempfile.TemporaryDirectory(prefix="memstore-matrix-") as scratch:
        folder = Path(scratch)
        shutil.copy(ROOT / ".ci" / "smoke.py", folder)
        pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "-q", "--no-cache-dir", "--no-compile"]
        for what, command, limit_s in (
            ("venv", [found, "-m", "venv", "venv"], INSTALL_S),
            ("install", [*pip, f"torch=={torch}", f"ray[default]=={ray}", str(wheel)], INSTALL_S),
            ("smoke", [str(folder / "venv/bin/python"), "smoke.py", str(ROOT)], SMOKE_S),
        ):
            is_well, said = run(command, folder, limit_s)
            if not is_well:
                return f"{what} failed", said
    return "works", said


def main() -> None:
    """Play the rows and print the table."""
    wheel, rows = Path(sys.argv[1]).resolve(), sys.argv[2:] or ROWS
    print("| Python | torch | Ray | result | said last |\n|---|---|---|---|---|")
    failed = False
    for row in rows:
        begun_s = time.monotonic()
        result, said = play(wheel, row)
        failed |= result not in ("works", "not run")
        print(f"| {' | '.join(row.split(':'))} | {result} ({time.monotonic() - begun_s:.0f} s) | {said} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
