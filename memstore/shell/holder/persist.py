"""Carries out durable orders: parts, markers, removals, lists. Never on a path a put waits for (R31)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from memstore.core.arena.replica_index import Shelved
from memstore.core.durable.slice_format import slice_range
from memstore.core.format.manifest import chunk_digest
from memstore.core.schedule.durable_interval import paced
from memstore.core.wire.messages import shard_from_wire, spec_from_wire, spec_to_wire
from memstore.errors import IntegrityError, MemstoreError
from memstore.shell.durable.tier import open_tier
from memstore.shell.holder.context import HolderContext
from memstore.shell.net.pacing import give_way
from memstore.shell.threads.own_threads import OwnThreads
from recovery.inventory import DurableMarker, ShardId, StepId

log = logging.getLogger("memstore")
PERSIST_THREADS = 4  # slices at once: each may be in memory once more (durable_part.SLICE_LIMIT_BYTES)
LIST_THREADS = 2  # apart from the writers: a stuck write must not keep a restore from listing markers


class Persister:
    """Durable work of one holder."""

    def __init__(self, context: HolderContext) -> None:
        self.context = context
        self.writers = OwnThreads(PERSIST_THREADS, "memstore-persist", give_way)
        self.listers = OwnThreads(LIST_THREADS, "memstore-markers")
        self.lock = threading.Lock()
        self.free_s: dict[str, float] = {}  # job -> when its next slice may begin
        self.stops: dict[tuple[str, StepId], threading.Event] = {}

    def close(self) -> None:
        """Abandon what is under way."""
        for stop in self.stops.values():
            stop.set()
        self.writers.close()
        self.listers.close()

    def order(self, body: dict[str, Any]) -> None:
        """Do as the controller says, in the background."""
        step = StepId(int(body["step"][0]), int(body["step"][1]))
        key = (str(body["job"]), step)
        if body["what"] == "stop":
            self.stops.setdefault(key, threading.Event()).set()
            return
        if body["what"] == "parts":
            stop = self._stop_of(key)
            for shard, digest, numbers in body["parts"]:
                for number in numbers:
                    work = partial(self._slice, body, shard, digest, number, stop)
                    self.writers.submit(_slow_by(body), self._guard, body, work, [shard[3], number])
        elif body["what"] == "marker":
            self.writers.submit(_place(body), self._guard, body, lambda: self._marker(body, step), [-1, 0])
        elif body["what"] == "key":
            self.listers.submit(_place(body), self._guard, body, lambda: self._say_key(body), [-1, 0])
        elif body["what"] == "remove" and body.get("is_torn"):
            self.writers.submit(_place(body), self._guard, body, lambda: self._remove(body, step), [-1, 0])
        elif body["what"] == "remove":
            self.writers.submit(_place(body), self._quietly, lambda: self._remove(body, step))

    def _stop_of(self, key: tuple[str, StepId]) -> threading.Event:
        """Return what stops the writing of a step: more slices of it may be ordered, and it may begin anew."""
        job, step = key
        for old in [k for k in self.stops if k[0] == job and k[1] != step]:
            self.stops.pop(old).set()  # one step at a time is written
        if key not in self.stops or self.stops[key].is_set():
            self.stops[key] = threading.Event()
        return self.stops[key]

    def _guard(self, body: dict[str, Any], work: Any, piece: list[int]) -> None:
        report = _report(body, piece)
        try:
            if not work():
                return
        except MemstoreError as exc:
            report.update(ok=False, why=str(exc))
        except BaseException as exc:  # a panic in obstore's native code is no Exception, and must be reported too
            log.exception("durable write")
            report.update(ok=False, why=repr(exc))
        self.context.report("persisted", report)

    def _say_key(self, body: dict[str, Any]) -> bool:
        """Report the name of the key that is in the file now."""
        self.context.report("persisted", {**_report(body, [-1, 0]), "key": open_tier(body["durable"]).key})
        return False

    def _remove(self, body: dict[str, Any], step: StepId) -> bool:
        open_tier(body["durable"]).remove_step(str(body["job"]), step, only_unmarked=bool(body["only_unmarked"]))
        return True

    def _quietly(self, work: Any) -> None:
        try:
            work()
        except MemstoreError as exc:
            log.warning("durable clean-up: %s", exc)

    def _slice(self, body: dict[str, Any], shard_body: Any, digest: str, number: int, stop: threading.Event) -> bool:
        shard = shard_from_wire(shard_body)
        if stop.is_set():
            return False
        found = self.context.vault.shelf.find(shard, digest)
        if found is not None and stop.wait(self._pause_s(body, found, number)):  # before the pin: it may take long
            return False
        tier = open_tier(body["durable"])
        if tier.key != body["key"]:
            why = f"durable_key_file has key {tier.key} here, ordered was {body['key']}: put the same "
            report = {**_report(body, [shard.rank, number]), "key": tier.key}
            self.context.report("persisted", {**report, "ok": False, "why": f"{why}file on all hosts"})
            return False
        shelved, manifest, chunks = self._copied(shard, digest, number)
        nbytes = tier.write_slice(shard, shelved.spec, number, manifest, chunks, should_stop=stop.is_set)
        return nbytes is not None

    def _copied(self, shard: ShardId, digest: str, number: int) -> tuple[Shelved, bytes, list[bytes]]:
        """Copy what a slice is made of: a pin held while storage hangs would keep slots that puts need."""
        pinned = self.context.vault.pin(shard, digest)
        if pinned is None:
            raise IntegrityError(f"{shard} is not here any more")
        shelved, pin = pinned
        try:
            return shelved, self.context.vault.manifest(shelved), list(self._chunks(shelved, number))
        finally:
            self.context.vault.unpin(shelved, pin)

    def _pause_s(self, body: dict[str, Any], shelved: Shelved, number: int) -> float:
        """Return how long a slice has to wait for its turn under the job's cap for this host."""
        nbytes = sum(shelved.spec.chunk_nbytes(index) for index in slice_range(shelved.spec, number))
        now, job = time.monotonic(), str(body["job"])
        with self.lock:
            start_s, self.free_s[job] = paced(now, self.free_s.get(job, now), nbytes, body["durable"]["bytes_per_s"])
        return start_s - now

    def _chunks(self, shelved: Shelved, number: int) -> Iterator[bytes]:
        for index in slice_range(shelved.spec, number):
            view = self.context.vault.chunk_view(shelved, index)
            chunk = bytes(view) if view is not None else None  # digested after it left the slot (R7)
            if chunk is not None and chunk_digest(chunk) != shelved.digests[index]:
                self.context.vault.verify(shelved)  # condemns it, so that repair replaces it
                self.context.sealed(shelved)
                chunk = None
            if chunk is None:
                raise IntegrityError(f"chunk {index} of {shelved.shard} went bad before it was written")
            yield chunk

    def _marker(self, body: dict[str, Any], step: StepId) -> bool:
        specs = {int(rank): spec_from_wire(spec) for rank, spec in body["specs"]}
        tier = open_tier(body["durable"])
        tier.write_marker(str(body["job"]), DurableMarker(step, len(specs), specs, body["key"]), body["lineage"])
        # What abandoned writes left before it.
        self.writers.submit(_place(body), self._quietly, lambda: tier.sweep(str(body["job"]), {step}))
        return True

    def markers(self, body: dict[str, Any]) -> None:
        """List the durable markers of a job, in the background."""
        self.listers.submit(_place(body), self._list, body)

    def _list(self, body: dict[str, Any]) -> None:
        report = {"job": body["job"], "call": body["call"], "ok": True, "why": "", "markers": [], "key": ""}
        report["lacks"] = ""
        try:
            tier = open_tier(body["durable"])
            report["key"] = tier.key
            records, problems = tier.marker_records(str(body["job"]))
            report["markers"] = [
                [
                    r.marker.step.attempt,
                    r.marker.step.step,
                    [[rank, spec_to_wire(spec)] for rank, spec in sorted(r.marker.specs.items())],
                    r.marker.key,
                    dict(r.lineage),
                ]
                for r in records
            ]
            report["why"] = "; ".join(problems)
            if body.get("check") is not None:
                report["lacks"] = tier.lacks(str(body["job"]), StepId(*map(int, body["check"])))
        except MemstoreError as exc:
            report.update(ok=False, why=str(exc))
        except Exception as exc:
            log.exception("durable markers")
            report.update(ok=False, why=repr(exc))
        self.context.report("markers", report)


def _place(body: dict[str, Any]) -> str:
    """Return the storage that an order is about: one that hangs holds up nobody who uses another (D205)."""
    return str(body["durable"]["url"])


def _slow_by(body: dict[str, Any]) -> tuple[str, str]:
    """Return what the writing of slices may wait for: the storage, and with a cap the job's turn."""
    return _place(body), str(body["job"]) if body["durable"]["bytes_per_s"] else ""


def _report(body: dict[str, Any], piece: list[int]) -> dict[str, Any]:
    """Return the report that an order was carried out."""
    report = {key: body[key] for key in ("job", "what", "step")}
    return {**report, "rank": piece[0], "slice": piece[1], "ok": True, "why": "", "key": body.get("key", "")}
