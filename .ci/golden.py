"""Keep what this release writes, for the tests of all releases after it: `golden.py` in a checkout, once per release.

Writes tests/golden/VERSION: `store.tar.xz`, which has a host's folder and durable storage, `frames.xz`, which has a
frame of every message, and `about.json`. tests/integration/faults/test_releases.py reads them.
"""

from __future__ import annotations

import json
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memstore.core.format.releases import FORMATS  # noqa: E402
from memstore.core.wire.codec import Message, encode_frame  # noqa: E402
from memstore.core.wire.frame import Kind  # noqa: E402
from memstore.distribution import VERSION  # noqa: E402
from memstore.testing.clusters.processes import ProcessCluster, wait_for  # noqa: E402
from memstore.testing.fuzz.messages import MODULES, declared, sample  # noqa: E402
from memstore.testing.ranks.fleet import Fleet  # noqa: E402
from memstore.testing.ranks.rank_process import RankNursery, together  # noqa: E402

HOSTS = {f"h{number}": {"rack": f"r{number}"} for number in range(5)}
LAST_STEP = 1
NO_PART = ("lock", "secret", "spares", "holder.sock")  # of what a successor adopts


def frames() -> bytes:
    """Return a frame of every message, with all fields and with as few as it may have."""
    kinds = [kind for module in MODULES for kind in declared(module) if issubclass(kind, Message)]
    return b"".join(
        encode_frame(Kind.EVENT, sample(kind, is_full=is_full))  # type: ignore[arg-type]
        for kind in kinds
        for is_full in (True, False)
    )


def write_store(path: Path) -> None:
    """Train two jobs, one with copies and durable steps, one with parity; keep the first host's folder."""
    with tempfile.TemporaryDirectory(prefix="memstore-golden-") as scratch, RankNursery() as nursery:
        durable = Path(scratch, "durable")
        durable.mkdir()
        sizes = {"chunk_bytes": 4 << 10, "arena_bytes": 512 << 10}
        with ProcessCluster(Path(scratch, "cluster"), HOSTS, **sizes) as cluster:  # type: ignore[arg-type]
            copies = Fleet(cluster, nursery, job="copies", kib=56, durable=str(durable), durable_every=1)
            ranks, _ = copies.resume(["h0", "h1"])
            for step in range(LAST_STEP + 1):
                together(ranks, "train", first=step, last=step)
                ranks[0].call("wait", step=step, level="durable")  # the next one names what did not change since
            Fleet(cluster, nursery, job="parity", kib=8, parity=4).begin([*HOSTS], last_step=LAST_STEP)
            nursery.kill_all()
            wait_for(lambda: len(cluster.manifests("h0")) == 4, "its own shard of each job, a copy, and parity")
            cluster.kill_all()
            with tarfile.open(path, "w:xz") as archive:
                for file in sorted(cluster.arena("h0").iterdir()):
                    if file.name not in NO_PART:
                        archive.add(file, f"h0/{file.name}", filter=_ours)
                archive.add(durable, "durable", filter=_ours)


def _ours(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    """Write the folder of this release, which is not there yet."""
    folder = ROOT / "tests" / "golden" / VERSION
    folder.mkdir(parents=True)
    write_store(folder / "store.tar.xz")
    (folder / "frames.xz").write_bytes(lzma.compress(frames()))
    about = {"formats": dict(FORMATS), "last_step": LAST_STEP}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for file in sorted(folder.iterdir()):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
