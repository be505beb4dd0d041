"""Link a wheel's declared dependencies, and theirs, from this environment into another: nothing is installed twice.

    lend.py WHEEL SITE_PACKAGES

What the wheel needs and does not declare is not there, as in a fresh installation.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def requirements_of(wheel: Path) -> list[str]:
    """Return the "Requires-Dist" lines of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def needed(requirements: Iterable[str], extras: Iterable[str] = ("",)) -> dict[str, set[str]]:
    """Return the names of all distributions that requirements lead to, each with the extras that are asked for."""
    found: dict[str, set[str]] = {}
    todo = [(line, extra) for line in requirements for extra in extras]
    while todo:
        line, of_extra = todo.pop()
        one = Requirement(line)
        if one.marker is not None and not one.marker.evaluate({"extra": of_extra}):
            continue
        known = found.setdefault(one.name.lower(), set())
        for extra in {"", *one.extras} - known:
            known.add(extra)
            todo += [(more, extra) for more in distribution(one.name).requires or ()]
    return found


def main() -> None:
    """Link them."""
    wheel, site_packages = map(Path, sys.argv[1:])
    for name in needed(requirements_of(wheel)):
        lent = distribution(name)
        home = Path(str(lent.locate_file("")))
        for top in {file.parts[0] for file in lent.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(home / top)


if __name__ == "__main__":
    main()
