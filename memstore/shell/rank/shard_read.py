"""A shard that was staged on this host, or is just coming here, seen from the process that reads it (R7, R26, R27)."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np

from memstore.core.cluster.text import dropped_text
from memstore.core.format.manifest import Manifest, decode_manifest
from memstore.errors import IntegrityError, PeerTimeout, RecoveryError, StepDropped
from memstore.shell.arena.page_locks import PageHold
from memstore.shell.codec.interpreter import waiting
from memstore.shell.codec.verified_stream import Views
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.range_read import ShardRanges
from memstore.shell.tensors.slot_stream import address_of
from memstore.shell.threads.answers import answer_of

MEND_TIMEOUT_S = 120.0  # for chunks to come from another copy; a holder that cannot reach one says so far earlier


def pin_views(link: HolderLink, views: Views, device: int) -> None:
    """Let a CUDA device read these chunks where they lie."""
    link.mapping.pin_at([address_of(np.frombuffer(view, np.uint8)) for _, view in views if view.nbytes], device)


class StagedShard:
    """The slots that an answer to a get names; pinned until `close`."""

    def __init__(self, link: HolderLink, manifest: Manifest, answer: dict[str, Any]) -> None:
        self.link, self.manifest = link, manifest
        self._slots: list[int | None] = list(answer["slots"])
        self._pin, self._hold = answer["pin"], link.mapping.open().reading()
        self._hold.add(slot for slot in self._slots if slot is not None)
        if len(self._slots) != len(manifest.chunks):
            raise IntegrityError(
                f"{manifest.shard} has {len(manifest.chunks)} chunks, its holder named {len(self._slots)} slots: "
                "call get() again"
            )

    def take(self, wanted: Sequence[int]) -> Views:
        """Return all of them; one that was lost after staging as an empty view, which is no chunk's."""
        return [(index, self._view(index)) for index in wanted]

    def pin(self, views: Views, device: int) -> None:
        """Let a CUDA device read these where they lie."""
        pin_views(self.link, views, device)

    def _view(self, index: int) -> memoryview:
        slot = self._slots[index]
        return memoryview(b"") if slot is None else self.link.view(slot, self.manifest.chunks[index].nbytes)

    def mend(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """Have the holder digest its copies of these chunks again, and bring bad ones from elsewhere (R27)."""
        shard, chunk_bytes = self.manifest.shard, self.manifest.chunk_bytes
        ranges = ShardRanges(self.link, shard.job, MEND_TIMEOUT_S)
        spans = [(index * chunk_bytes, self.manifest.chunks[index].nbytes) for index in wanted]
        try:
            with waiting():
                opened = ranges.open(ranges.ask(shard.step, shard.rank, spans, chunk_bytes, attempt=shard.attempt))
        except RecoveryError:
            self._check_kept()
            raise
        try:
            if opened.manifest != self.manifest:
                raise IntegrityError(f"{shard} was put again while it was read: call get() again")
            use(opened.views)
        finally:
            opened.close()

    def _check_kept(self) -> None:
        """Raise StepDropped if newer steps took the place of this one."""
        shard = self.manifest.shard
        rows = self.link.call("steps", {"job": shard.job}, MEND_TIMEOUT_S)["steps"]
        kept = [(int(row["attempt"]), int(row["step"])) for row in rows if row["committed"] and row["copies"]]
        if not kept or max(kept) <= (shard.attempt, shard.step) or (shard.attempt, shard.step) in kept:
            return
        raise StepDropped(self.link.commands(dropped_text(shard.job, shard.step)))

    def close(self) -> None:
        """Let go of the slots."""
        self._hold.close()
        self.link.notify({"k": "unpin", "pin": self._pin})


class ShardRead:
    """One rank's shard on its way to this host: chunks can be taken while others are still coming (R27).

    A context manager; the staged shard stays pinned until its end.

    Raises:
        PeerTimeout: from any wait, once `timeout_s` have passed.
        RecoveryError: there is no such shard, or some chunk has no good copy.
    """

    def __init__(self, link: HolderLink, body: dict[str, Any], timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._manifest: Manifest | None = None
        self._slots: dict[int, int] = {}  # of chunks that have come, not taken yet
        self._hold: PageHold | None = None  # of those that were taken
        self._staged: StagedShard | None = None
        self._heard: queue.SimpleQueue[dict[str, Any] | Future[dict[str, Any]]] = queue.SimpleQueue()
        number = link.hear(self._heard)
        self._number = number
        self._future = link.call_soon("read", {**body, "stream": [link.nonce, number]})
        self._future.add_done_callback(self._heard.put)

    def __enter__(self) -> ShardRead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.unsubscribe(self._number)
        self._link.forget_call(self._future)
        if self._hold is not None:
            self._hold.close()
        if self._staged is not None:
            self._staged.close()
        else:
            self._future.add_done_callback(self._give_back)  # it may just have come; later ones the link gives back

    def _give_back(self, future: Future[dict[str, Any]]) -> None:
        if future.exception() is None:
            self._link.notify({"k": "unpin", "pin": future.result()["pin"]})

    def manifest(self) -> Manifest:
        """Wait for the manifest."""
        while self._manifest is None:
            self._listen()
        return self._manifest

    def answer(self) -> dict[str, Any]:
        """Wait until the whole shard is here, or cannot be brought; return the controller's answer."""
        while self._staged is None:
            self._listen()
        return answer_of(self._future)

    def take(self, wanted: Sequence[int]) -> Views:
        """Return those of the chunks that have come, at least one."""
        while self._staged is None:
            came = [(index, self._slots.pop(index)) for index in wanted if index in self._slots]
            if came:
                sizes = self.manifest().chunks
                self._hold = self._hold or self._link.mapping.open().reading()
                self._hold.add(slot for _, slot in came)
                return [(index, self._link.view(slot, sizes[index].nbytes)) for index, slot in came]
            self._listen()
        return self._staged.take(wanted)

    def pin(self, views: Views, device: int) -> None:
        """Let a CUDA device read these where they lie."""
        pin_views(self._link, views, device)

    def mend(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """Bring chunks again; see `StagedShard.mend`."""
        self.answer()
        if self._staged is not None:
            self._staged.mend(wanted, use)

    def _named(self, told: Mapping[str, Any]) -> Manifest:
        """Return the manifest of the shard; a call sent again after a link broke may get another answer."""
        named = decode_manifest(bytes(told["manifest"]))
        if self._manifest is None:
            self._manifest = named
        elif self._manifest != named:
            raise IntegrityError(
                f"{named.shard} was chosen while {self._manifest.shard} was read: the holder or the controller came "
                "back in between; call get() again"
            )
        return self._manifest

    def _listen(self) -> None:
        """Wait for one message of the holder."""
        try:
            if self._heard.empty():
                with waiting():
                    heard = self._heard.get(timeout=max(0.0, self._until_s - time.monotonic()))
            else:
                heard = self._heard.get_nowait()
        except queue.Empty:
            raise PeerTimeout(
                f"read of job {self._link.job!r} was not answered within {self._timeout_s:g} s: is the controller "
                f"running? ({self._link.commands('memstore status')})",
                operation="read", waited_s=self._timeout_s, limit_s=self._timeout_s,
            ) from None  # fmt: skip
        if isinstance(heard, Future):
            answer = heard.result()
            self._staged = StagedShard(self._link, self._named(answer), answer)
            return
        if "manifest" in heard:
            self._named(heard)
        self._slots.update({int(index): int(slot) for index, slot in heard["chunks"]})
