"""Which release reads which formats, and whether a running host may go on with another release (R40). Pure.

A format is one number for all that it names. A change of what is written raises it where it is declared, and adds
the row of the next release here; the golden files of the releases (tests/golden) show that nothing changed unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memstore.distribution import VERSION

RELEASES: Mapping[str, Mapping[str, int]] = {
    "0.2.0": {
        "wire": 19,  # what processes send one another; also what holder and controller are started with
        "arena": 3,  # the slot table, and all else in a host's folder: manifests and the layouts in them
        "journal": 12,
        "manifest": 1,
        "parity": 3,  # a manifest of rows
        "layout": 2,
        "marker": 4,
        "slice": 3,
    }
}
FORMATS = RELEASES[VERSION]
IN_MEMORY = ("arena", "journal")


def reader_of(part: str, number: int) -> str:
    """Return who reads a format that this release does not, for an error."""
    having = [release for release, formats in RELEASES.items() if formats[part] == number]
    if having:
        return f"memstore {having[-1]} reads it"
    first, *_, last = [*RELEASES, *RELEASES]
    if number > max(formats[part] for formats in RELEASES.values()):
        return f"a release after {last} wrote it: use that one"
    return f"a build before {first} wrote it, which no release reads"


@dataclass(frozen=True, slots=True)
class Build:
    """A memstore: one that runs, or one that is installed; its formats by part."""

    version: str = "0.1"  # of one that does not say
    formats: Mapping[str, int] = field(default_factory=dict)


def refused_upgrade(running: Mapping[str, Build], installed: Mapping[str, Build]) -> str:
    """Return why the hosts cannot be restarted one by one with what is installed there, and what to do; "" if they can.

    Args:
        running: By host; of the controller, too.
        installed: By the same names.
    """
    versions = sorted({build.version for build in installed.values()})
    if len(versions) > 1:
        having = (
            f"{version} on {', '.join(sorted(h for h, build in installed.items() if build.version == version))}"
            for version in versions
        )
        return f"different versions are installed: {'; '.join(having)}. Install one everywhere, then upgrade"
    for host, build in sorted(installed.items()):
        now = running[host]
        kept = [part for part in IN_MEMORY if now.formats.get(part) != build.formats.get(part)]
        what = f"memstore {build.version} is installed on {host}, {now.version} runs there"
        if kept:
            return (
                f"{what}: {_numbers(kept, now, build)}. What lies in memory would not be read. End the training, make "
                "its newest step durable (`memstore persist JOB`), then `memstore down --discard` and `memstore up`"
            )
        if now.formats.get("wire") != build.formats.get("wire"):
            return (
                f"{what}: {_numbers(['wire'], now, build)}. Ranks keep the code that they began with, so they would "
                "find no holder that understands them. End the training, then `memstore down` and `memstore up`: the "
                "arenas stay, and the next start goes on from the newest committed step"
            )
    return ""


def _numbers(parts: list[str], now: Build, then: Build) -> str:
    return " and ".join(
        f"{part} format {now.formats.get(part, 'unknown')} becomes {then.formats.get(part, 'unknown')}"
        for part in parts
    )


def hosts_to_restart(
    running: Mapping[str, Build], installed: Mapping[str, Build], *, chosen: tuple[str, ...], is_restart: bool
) -> list[str]:
    """Return the hosts whose holder does not run what is installed; with `is_restart` all; of `chosen`, if any are."""
    wanted = [host for host in sorted(running) if is_restart or running[host].version != installed[host].version]
    return [host for host in wanted if not chosen or host in chosen]
