"""Where the repository and the programs that tests start lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent  # programs that tests start as processes of their own
