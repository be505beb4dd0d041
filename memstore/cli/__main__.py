"""`python -m memstore.cli`, for installations whose scripts are not on the path."""

from __future__ import annotations

from memstore.cli import main

if __name__ == "__main__":
    main(prog_name="memstore")
