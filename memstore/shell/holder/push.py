"""Copies this host's shards to peers: at once after a put, or when the controller orders a repair (R13, R29).

Retries while a peer has no room yet; gives up, and says why, when waiting cannot help or took too long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memstore.core.wire.messages import shard_from_wire, shard_to_wire
from memstore.core.wire.peer_messages import Ping
from memstore.errors import MemstoreError, PeerRefused, TransportError
from memstore.shell.holder.context import HolderContext
from memstore.shell.holder.send_gate import Traffic
from memstore.shell.holder.shared_shards import Twins
from memstore.shell.net.pacing import give_way
from memstore.shell.peer.client import Peer, RateLimit
from memstore.shell.peer.outgoing_shard import Fresh, Stored
from recovery.inventory import ShardId

log = logging.getLogger("memstore")
RETRY_S = 0.05
ROOM_WAIT_S = 10.0  # a target frees room when it hears of the last commit; longer means it is really full
PUSH_THREADS = 8


Done = Callable[[str, bool], None]  # target, whether it has sealed the shard


class Pusher:
    """Outgoing copies of one holder."""

    def __init__(
        self, context: HolderContext, traffic: Traffic, twins: Twins, on_replicated: Callable[[ShardId], None]
    ) -> None:
        """`on_replicated`: hears of a put that every target has sealed (R15)."""
        self.context, self.traffic, self.twins, self.on_replicated = context, traffic, twins, on_replicated
        self.lock = threading.Lock()
        self.workers = ThreadPoolExecutor(PUSH_THREADS, "memstore-push", give_way)
        self.repairs = ThreadPoolExecutor(PUSH_THREADS, "memstore-repair", give_way)  # never behind what marks hold
        self.under_way: dict[tuple[ShardId, str], list[Done]] = {}  # -> who hears of its end
        self.silent_since_s: dict[str, float] = {}  # targets that the view has and that we cannot reach
        self.repair_limit = RateLimit(context.config.repair_bytes_per_s, context.stopping)

    def replicate(self, shard: ShardId, digest: str, fresh: Fresh | None = None) -> bool:
        """Push a shard that is stored, or being sealed, to this host's targets; then its ticket is replicated (R15).

        False if there are no targets, so that nothing is to be waited for.
        """
        self.traffic.release(shard.job, shard.rank, (shard.attempt, shard.step))
        targets = self.twins.targets(shard)
        left = set(targets)

        def done(target: str, is_ok: bool) -> None:
            if is_ok:
                left.discard(target)
                if not left:
                    self.on_replicated(shard)

        for target in targets:
            self.submit(shard, digest, target, is_repair=False, done=done, fresh=fresh)
        return bool(targets)

    def connect(self, job: str) -> None:
        """Open the streams to a job's targets before the first push needs them."""
        for target in list(self.twins.ordinary_targets(job)):
            try:
                self.context.peers.peer(target).connect()
            except TransportError as exc:
                log.info("job %s: host %s cannot be reached yet: %s", job, target, exc)

    def order(self, body: dict[str, Any]) -> None:
        """A push ordered by the controller."""
        self.submit(
            shard_from_wire(body["shard"]), str(body["digest"]), str(body["target"]), is_repair=bool(body["is_repair"])
        )

    def submit(
        self,
        shard: ShardId,
        digest: str,
        target: str,
        *,
        is_repair: bool,
        done: Done | None = None,
        fresh: Fresh | None = None,
    ) -> None:
        """Queue one push, or wait with the same one that is under way."""
        with self.lock:
            waiting = self.under_way.get((shard, target))
            if waiting is not None:
                waiting += [done] if done is not None else []
                return
            self.under_way[shard, target] = [done] if done is not None else []
        if fresh is not None:
            fresh.begin()
        workers = self.repairs if is_repair else self.workers
        workers.submit(self._run, shard, digest, target, is_repair, fresh)

    def _run(self, shard: ShardId, digest: str, target: str, is_repair: bool, fresh: Fresh | None) -> None:
        why, is_final = "", True
        try:
            if fresh is None:
                why, is_final = self._push(shard, digest, target, is_repair)
            else:
                why, is_final = self._push_fresh(fresh, target)
        except MemstoreError as exc:
            why = str(exc)
        except Exception as exc:
            log.exception("push of %s to %s", shard, target)
            why = repr(exc)
        finally:
            with self.lock:
                waiting = self.under_way.pop((shard, target), [])
        if why:
            self.context.report(
                "push_failed", {"shard": shard_to_wire(shard), "target": target, "why": why, "is_final": is_final}
            )
        for done in waiting:
            done(target, not why)

    def _push_fresh(self, fresh: Fresh, target: str) -> tuple[str, bool]:
        """Send while it is digested; what goes wrong is tried again once it is sealed. PeerRefused: the put failed."""
        try:
            with self._reached(target) as peer, self.traffic.sending(fresh) as gate:
                peer.push(
                    fresh, sender=self.context.host_id, attempt=fresh.shard.attempt, throttle=_unthrottled,
                    gate=gate,
                )  # fmt: skip
            return "", True
        except (PeerRefused, TransportError):
            digest = fresh.sealed().spec.digest
        finally:
            fresh.release()
        return self._push(fresh.shard, digest, target, is_repair=False)

    def _push(self, shard: ShardId, digest: str, target: str, is_repair: bool) -> tuple[str, bool]:
        """Return ("", ...) when the target has sealed the shard, else why not and whether that is final."""
        deadline_s = time.monotonic() + ROOM_WAIT_S
        why = ""
        while not self.context.stopping.is_set():
            pinned = self.context.vault.pin(shard, digest)
            if pinned is None:
                return "", True
            shelved, pin = pinned
            is_final = False
            try:
                throttle = self.repair_limit if is_repair else _unthrottled
                attempt = max(shard.attempt, self.context.fences.first(shard.job)) if is_repair else shard.attempt
                shipment = Stored(self.context.vault, shelved)
                held = contextlib.nullcontext() if is_repair else self.traffic.sending(shipment)
                with self._reached(target) as peer, held as gate:
                    peer.push(shipment, sender=self.context.host_id, attempt=attempt, throttle=throttle, gate=gate)
                return "", True
            except PeerRefused as exc:
                why, is_final = str(exc), bool(getattr(exc, "is_final", False))
            except TransportError as exc:
                why, is_final = f"cannot reach {target}: {exc}", self._is_given_up(target)
            finally:
                self.context.vault.unpin(shelved, pin)
            if is_final or time.monotonic() > deadline_s:
                return why, True
            self.context.stopping.wait(RETRY_S)
        return "the holder is stopping", False

    @contextlib.contextmanager
    def _reached(self, target: str) -> Iterator[Peer]:
        """Give the peer, and remember whether it could be reached; one that could not answers a ping first.

        The controller may still hear of a host that we cannot reach: then no put waits for it again and again (R18).
        """
        try:
            peer = self.context.peers.peer(target)
        except TransportError:
            self.silent_since_s.pop(target, None)  # dead: the controller knows, and orders what is to be done
            raise
        try:
            if target in self.silent_since_s:
                peer.call(Ping(), timeout_s=self.context.config.suspect_after_s)
            yield peer
        except PeerRefused:
            self.silent_since_s.pop(target, None)
            raise
        except TransportError:
            self.silent_since_s.setdefault(target, time.monotonic())
            raise
        self.silent_since_s.pop(target, None)

    def _is_given_up(self, target: str) -> bool:
        """Say whether a target has been out of our reach for as long as a silent host takes to be dead (R28)."""
        since_s = self.silent_since_s.get(target)
        return since_s is not None and time.monotonic() - since_s > self.context.config.repair_after_s

    def close(self) -> None:
        """Stop taking work."""
        for workers in (self.workers, self.repairs):
            workers.shutdown(wait=False, cancel_futures=True)


def _unthrottled(nbytes: int) -> None:
    """A put goes at wire speed."""
