"""Some chunks of a shard, brought to this host for one reader that asked for ranges of it (R7, R27).

    ordered --every chunk here and digested--> ready --its reader took it--> lent --unpinned, or its link ended--> gone
      '--a source failed--> gone                 '--not taken in time, or kept too long--> gone

An excerpt is a draft that is never finished: it counts and serves as no copy of the shard. Content that this host
holds anyway, of whatever shard, is referenced, not fetched (R13). The reader digests again what it has copied.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

from memstore.core.arena.replica_index import Draft
from memstore.core.format.manifest import decode_manifest
from memstore.core.wire.messages import shard_from_wire, spec_from_wire
from memstore.errors import CapacityError, IntegrityError, PeerUnreachable
from memstore.shell.arena.replica_store import PIN_S
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.fetch import Fetcher
from recovery.inventory import ShardId


@dataclass(frozen=True)
class Excerpt:
    """The bytes a reader may copy: slots of the wanted chunks, None for all others."""

    name: str  # of the draft
    draft: Draft
    manifest: bytes
    deadline_s: float  # monotonic


class Excerpts:
    """All excerpts of one holder."""

    def __init__(self, context: HolderContext, fetcher: Fetcher) -> None:
        self.context, self.vault, self.fetcher = context, context.vault, fetcher
        self.lock = threading.Lock()
        self.tight = threading.Lock()  # of the one read that waits until others have given room back
        self.known: dict[int, Excerpt] = {}  # by the controller's number of the read

    def stage(self, body: dict[str, Any]) -> dict[str, list[int]]:
        """Bring the chunks here; return {} or, per source, those that it says it lacks.

        Where other readers have the room, waits for it with nothing in hand, one read after the other.

        Raises:
            TransportError, CapacityError: No evidence about the bytes (R25).
            IntegrityError: the shard has no such chunks.
        """
        with contextlib.suppress(CapacityError):
            return self._stage(body)
        with self.tight:
            deadline_s = self.fetcher.deadline_s()
            while True:
                try:
                    return self._stage(body)
                except CapacityError:
                    if not self.fetcher.may_wait(body, deadline_s):
                        raise

    def _stage(self, body: dict[str, Any]) -> dict[str, list[int]]:
        shard, spec = shard_from_wire(body["shard"]), spec_from_wire(body["spec"])
        wanted = _wanted(shard, body["chunks"], spec.chunks_count)
        deadline_s = self.fetcher.deadline_s()
        data, lack_all = self.fetcher.manifest(body, shard, spec.digest, deadline_s)
        if data is None:
            return {source: list(wanted) for source in lack_all or {self.context.host_id}}
        chunks = decode_manifest(data).chunks
        name = f"read-{-int(body['round'])}"
        digests, sizes = [c.digest for c in chunks], [c.nbytes for c in chunks]
        draft = self.vault.open_draft(name, shard, digests, sizes, int(body["attempt"]), wanted)
        try:
            self._digest_held(draft)
            self.vault.ensure_free(len(draft.missing))
            bad, problems = self.fetcher.fetch(self._elsewhere(body), draft, spec.digest, sizes, deadline_s)
            if draft.missing and problems and not bad:
                raise PeerUnreachable("; ".join(problems))
            if not draft.missing:
                with self.lock:
                    self.known[int(body["round"])] = Excerpt(name, draft, data, time.monotonic() + PIN_S)
                return {}
        except BaseException:
            self.vault.abort_draft(name, shard, only=draft)
            raise
        lacking = bad or {self.context.host_id: draft.missing}
        self.vault.abort_draft(name, shard, only=draft)
        return lacking

    def _digest_held(self, draft: Draft) -> None:
        """What this host holds already is good, or it is fetched like the rest."""
        for number in {draft.slots[i] for i in draft.wanted} - {None}:
            for hurt in self.vault.verify_slot(int(number or 0)):
                self.vault.on_hurt(hurt)

    def _elsewhere(self, body: dict[str, Any]) -> dict[str, Any]:
        """Chunks planned from this host that turned out bad come from another holder, if there is one."""
        others = [str(h) for h in body["holders"] if h != self.context.host_id]
        if not others:
            return body
        runs = [["peer", others[0], first, count] if tier == "local" else [tier, source, first, count]
                for tier, source, first, count in body["runs"]]  # fmt: skip
        return {**body, "runs": runs}

    def take(self, number: int) -> Excerpt:
        """Return what was staged for a read. IntegrityError if it is gone."""
        with self.lock:
            excerpt = self.known.get(number)
        if excerpt is None:
            raise IntegrityError("the chunks that were staged for this read are gone: read again")
        return excerpt

    def release(self, number: int) -> None:
        """The reader has copied them, or is gone."""
        with self.lock:
            excerpt = self.known.pop(number, None)
        if excerpt is not None:
            self.vault.abort_draft(excerpt.name, excerpt.draft.shard, only=excerpt.draft)

    def expire(self) -> None:
        """Let go of what nobody took, was kept past the deadline, or is of a step that was dropped (R7)."""
        now = time.monotonic()
        with self.lock:
            late = [n for n, each in self.known.items() if min(each.deadline_s, each.draft.deadline_s) < now]
        for number in late:
            self.release(number)


def _wanted(shard: ShardId, runs: list[list[int]], chunks_count: int) -> tuple[int, ...]:
    """Return the chunks of runs; IntegrityError if the shard has no such chunk."""
    for first, count in runs:
        if first < 0 or count < 0 or first + count > chunks_count:
            raise IntegrityError(
                f"{shard} has {chunks_count} chunks, the reader asks for {count} from chunk {first}: the metadata that "
                "names them is not of this shard"
            )
    return tuple(sorted({i for first, count in runs for i in range(first, first + count)}))
