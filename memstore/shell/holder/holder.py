"""The holder: owns one host's arena, serves its ranks and peers, obeys the controller (R2-R4, R17, R21, R28).

A plain object with threads; `actors.py` wraps it in a Ray actor and `testing/` in a process. It decides
nothing: what to push, stage, drop or fence is ordered by the controller (see core/wire/messages.py), what may
be received is said by core/arena/replica_index.py. It never imports torch or ray.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.arena.replica_index import Shelved
from memstore.core.cluster.facts import AttemptOpened, JobRemoved
from memstore.core.journal.records import entry_from_record
from memstore.core.wire.frame import Kind
from memstore.core.wire.messages import HostInfo, copy_to_wire
from memstore.errors import PeerUnreachable, TransportError
from memstore.shell.arena.folder import make_folder, write_secret
from memstore.shell.arena.idle_time import IdleTime
from memstore.shell.arena.incarnation import next_incarnation
from memstore.shell.arena.journal_file import Journal
from memstore.shell.arena.lock import ArenaLock, LockOwner
from memstore.shell.arena.memory_limits import admission, measure
from memstore.shell.arena.replica_store import Vault
from memstore.shell.arena.tombstones import Tombstones
from memstore.shell.holder.controller_session import SEND_S, ControllerSession, term_of
from memstore.shell.holder.folder_guard import FolderGuard
from memstore.shell.holder.journal_writer import FactKeeper
from memstore.shell.holder.orders import Orders
from memstore.shell.holder.persist import Persister
from memstore.shell.holder.push import Pusher
from memstore.shell.holder.rank_server import RankServer
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.holder.send_gate import Traffic
from memstore.shell.holder.shared_shards import Twins
from memstore.shell.holder.stage import Stager, sealed_copy
from memstore.shell.holder.trained_steps import TrainedSteps
from memstore.shell.host.descriptors import descriptor_stats
from memstore.shell.host.identity import HostIdentity
from memstore.shell.host.interface import resolve_interface
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import Listener, connect_unix
from memstore.shell.net.pacing import Lane
from memstore.shell.net.tls import Tls
from memstore.shell.peer.client import Peer
from memstore.shell.peer.server import PeerServer
from recovery.inventory import Copy

log = logging.getLogger("memstore")
REAP_S = 0.25  # how often dead owners of leases are looked for
FROZEN_AFTER_S = 2.0  # a lock owner that does not answer its socket for this long is replaced (R2)
LOCK_TIMEOUT_S = 10.0


class Holder:
    """One host's holder, serving once made; `close` leaves every byte in the arena for a successor."""

    def __init__(
        self,
        identity: HostIdentity,
        config: Config,
        *,
        secret: bytes,
        arena_limit_bytes: int,
        limit_words: tuple[str, str] = ("arena_bytes", ""),
        cluster: str = "",
        on_fatal: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.config, self.limit_words = config, limit_words  # what set the limit; a warning if it is small
        self.secret, self.tls, self.on_fatal = secret, Tls.load(config), on_fatal
        self.stopping = threading.Event()
        self.folder: Path = make_folder(config.arena_dir, store=config.store, host=identity.host_id)
        self.lock_file = ArenaLock.take(
            self.folder, timeout_s=LOCK_TIMEOUT_S, cluster=cluster, replace_frozen=self._is_frozen
        )
        write_secret(self.folder, secret)
        self.idle, self.tombstones = IdleTime(self.folder), Tombstones(self.folder)
        self.vault = Vault.open(
            self.folder, limit_bytes=arena_limit_bytes, chunk_bytes=config.chunk_bytes, limit_why=limit_words[0],
            admit=lambda asked, claimed: admission(measure(config.arena_dir), asked_bytes=asked, claimed_bytes=claimed),
        )  # fmt: skip
        self.vault.on_hurt = self.sealed
        self.journal = Journal.open(self.folder / "journal")
        self.facts = FactKeeper(self.journal, lambda seq: self.report("ack", {"seq": seq}))
        self.term, self.trained = 0, TrainedSteps()
        self.fences, self.removals = dict[str, int](), dict[str, int]()  # job -> its first attempt that may serve (R21)
        self._read_journal()
        self.targets, self.twins = dict[str, list[str]](), Twins(self)
        self.peers: dict[str, Peer] = {}
        self.session: ControllerSession | None = None
        self._peers_lock, self._session_lock = threading.Lock(), threading.Lock()
        self.lane = Lane(config.dscp, config.replicate_bytes_per_s, config.chunk_bytes)
        self.traffic = Traffic(self.folder, config.interleave_s)
        self.orders, self.stager = Orders(self), Stager(self)
        self.pusher = Pusher(self)
        self.persister = Persister(self)
        incarnation, self._began_s = next_incarnation(self.folder), time.monotonic()
        self._identity = {"role": "holder", "host": identity.host_id, "incarnation": incarnation}  # for peers
        self.ranks = RankServer(self)
        self.scrubber = Scrubber(self)
        self.peer_server = PeerServer(
            self.vault, identity.host_id,
            is_fenced=lambda job, attempt: attempt < self.fences.get(job, 0),
            on_sealed=self._copy_sealed, before_offer=self.twins.await_own,
        )  # fmt: skip
        self.listener = Listener.tcp(
            resolve_interface(config.interface), config.port, secret=secret, store=config.store,
            identity=self._identity, on_channel=self._accept, tls=self.tls,
        )  # fmt: skip
        self.info = HostInfo(
            identity.host_id, incarnation, str(self.listener.address[0]), int(self.listener.address[1]),
            identity.machine, identity.is_explicit, dict(identity.labels), arena_limit_bytes,
        )  # fmt: skip
        self.lock_file.describe(cluster=cluster, address=f"{self.info.address}:{self.info.port}")
        self.rank_listener = Listener.unix(self.folder / "holder.sock", on_channel=self.ranks.serve)
        self.guard = FolderGuard(self)
        self._threads = self._start_loops()

    def _start_loops(self) -> list[threading.Thread]:
        loops = {"heartbeat": self._heartbeat_loop, "reap": self._reap_loop, "scrub": self.scrubber.run}
        threads = [threading.Thread(target=run, name=f"memstore-{name}", daemon=True) for name, run in loops.items()]
        for thread in threads:
            thread.start()
        return threads

    def stop_serving(self) -> None:
        """End every connection: from now on nobody is told anything, and nobody's bytes are taken."""
        self.stopping.set()
        self.twins.wake()
        self.listener.close()
        self.rank_listener.close()
        if self.session is not None:
            self.session.close()
        for part in (self.stager, self.pusher, self.persister, self.orders):
            part.close()
        with self._peers_lock:
            for peer in self.peers.values():
                peer.close()

    def close(self) -> None:
        """Stop serving and give up the lock; the arena stays (R5)."""
        self.stop_serving()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self.journal.close()
        self.vault.close()
        self.idle.close()
        self.lock_file.release()

    def _is_frozen(self, owner: LockOwner) -> bool:
        """Say whether the lock's live owner has stopped answering on its own socket (R2)."""
        try:
            with contextlib.closing(connect_unix(self.folder / "holder.sock", timeout_s=FROZEN_AFTER_S)) as channel:
                channel.send(
                    Kind.EVENT, 0, {"k": "hello", "nonce": "lock-probe", "pid": 0, "start": 0, "is_tool": True},
                    deadline_s=FROZEN_AFTER_S,
                )  # fmt: skip
                channel.recv(timeout_s=FROZEN_AFTER_S)
            return False
        except TransportError:
            return True

    def _read_journal(self) -> None:
        """Learn the highest term and the fences from before: nothing older is served meanwhile (R17, R21)."""
        for record in self.journal.records():
            entry = entry_from_record(record)
            self.term = max(self.term, entry.term)
            if isinstance(entry.fact, AttemptOpened):
                self.fences[entry.fact.job] = max(self.fences.get(entry.fact.job, 0), entry.fact.attempt)
            elif isinstance(entry.fact, JobRemoved):
                self.removed(entry.fact.job, entry.fact.attempt)

    def removed(self, job: str, attempt: int) -> None:
        """The job was removed: what it was up to this attempt is fenced."""
        self.removals[job] = attempt + 1
        self.trained.forget(job)
        self.fences[job] = max(self.fences.get(job, 0), attempt + 1)

    # -- connections --------------------------------------------------------------------------

    def _accept(self, channel: Channel, identity: dict[str, Any]) -> None:
        role = identity.get("role")
        if role == "controller":
            self._serve_controller(channel, term_of(identity))
        elif role == "holder":
            self.peer_server.serve(channel, identity)

    def peer(self, host_id: str) -> Peer:
        """Return the connection pool to a peer of the present view."""
        with self._peers_lock:
            peer = self.peers.get(host_id)
        if peer is None:
            raise PeerUnreachable(f"host {host_id} is not in the store's view: it is dead or unknown", host=host_id)
        return peer

    def set_view(self, rows: list[list[Any]], gone: list[str] | None) -> None:
        """Addresses of hosts; a peer that moved or restarted gets new connections (R3).

        Args:
            rows: Of all live hosts (`gone` is None), or of those that are new or elsewhere.
            gone: Who is dead since.
        """
        with self._peers_lock:
            seen = {str(row[0]): (str(row[1]), int(row[2])) for row in rows if row[0] != self.info.host_id}
            dead = self.peers.keys() - seen.keys() if gone is None else self.peers.keys() & set(gone)
            moved = [h for h, p in self.peers.items() if h in seen and seen[h] != (p.address, p.port)]
            for host in (*dead, *moved):
                self.peers.pop(host).close()
            for host, (address, port) in seen.items():
                if host not in self.peers:
                    self.peers[host] = Peer(
                        host, address, port, secret=self.secret, store=self.config.store,
                        identity=dict(self._identity), streams=self.config.streams,
                        damage=self.peer_server.damage, lane=self.lane, tls=self.tls,
                    )  # fmt: skip
            self.peer_server.keep_senders(set(self.peers))

    # -- the controller's session ---------------------------------------------------------------

    def _serve_controller(self, channel: Channel, term: int) -> None:
        """Obey the newest session of the highest term only; tell a lower one to go (R17)."""
        session = ControllerSession(channel)
        with self._session_lock:
            newest = self.term = max(self.term, term)
            if term == newest:
                old, self.session = self.session, session
                self.facts.forget()
        if term < newest:
            channel.send(Kind.EVENT, 0, {"k": "stale", "term": newest}, deadline_s=SEND_S)
            return
        if old is not None:
            old.replaced(term)
        try:
            session.open(self._up())
            self.ranks.calls.ask_again()
            while True:
                body = channel.recv(timeout_s=None).body
                with self._session_lock:  # an order is over before a newer session begins, or is not obeyed
                    if self.session is not session:
                        break
                    self.orders.obey(body)
        except PeerUnreachable:
            log.info("host %s: the controller's session ended", self.info.host_id)
        finally:
            with self._session_lock:
                self.session = None if self.session is session else self.session
            session.close()

    def _up(self) -> dict[str, Any]:
        """What a controller must know of this host first: who it is, what it holds, its journal (R16)."""
        with self.vault.lock:
            copies = [copy_to_wire(c) for c in self.vault.shelf.copies(self.info.host_id)]
        info, journal = self.info, self.journal_records()
        return {
            "k": "up", "host": info.host_id, "incarnation": info.incarnation, "address": info.address,
            "port": info.port, "machine": info.machine, "is_explicit": info.is_explicit,
            "labels": dict(info.labels), "limit_bytes": info.limit_bytes, "copies": copies,
            "journal": journal,
            "up_s": time.monotonic() - self._began_s, "idle_s": self.idle.idle_s, "dropped": self.tombstones.stories,
            "notes": self.vault.adoption_notes,
            "ranks": sorted(self.ranks.owners),
        }  # fmt: skip

    def journal_records(self) -> list[bytes]:
        """Return the facts that the journal has; what a session is just writing is in it whole."""
        with self._session_lock:  # else it would be a damaged rest, to be cut off
            return self.journal.records()

    def begin_again(self, above: int) -> None:
        """Take a higher incarnation: the controller knows of a later life of this host, whose folder was lost (R3)."""
        before, number = self.info.incarnation, next_incarnation(self.folder, above)
        log.warning(
            "host %s: the controller refused incarnation %d, it has seen %d: going on as %d",
            self.info.host_id, before, above, number,
        )  # fmt: skip
        self.info = replace(self.info, incarnation=number)
        self._identity["incarnation"] = number
        with self._peers_lock:  # they are told of this life; the next session brings their addresses again
            while self.peers:
                self.peers.popitem()[1].close()
        session = self.session
        if session is not None:
            session.close()

    def report(self, kind: str, body: dict[str, Any]) -> None:
        """Queue a report to the controller; without a session it is dropped: inventories replace it."""
        session = self.session
        if session is not None:
            session.put({"k": kind, **body})

    def relay(self, call_id: int, verb: str, body: dict[str, Any]) -> None:
        """Pass a rank's call on; it is sent again to the next controller if this one dies."""
        self.report("call", {"id": call_id, "verb": verb, "body": body})

    def rank_gone(self, nonce: str) -> None:
        """A rank's process is dead."""
        self.report("rank_gone", {"nonce": nonce})

    def _heartbeat_loop(self) -> None:
        """A thread of its own that touches no bulk data (R28)."""
        while not self.stopping.wait(self.config.heartbeat_s):
            self.beat()

    def beat(self) -> None:
        """Send the controller a heartbeat, if there is one."""
        session = self.session
        if session is not None:
            with contextlib.suppress(TransportError):
                session.beat(self.stats())

    def stats(self) -> dict[str, Any]:
        """What every heartbeat carries of this host."""
        counts: dict[str, Any] = {
            "trained": self.trained.stats(),
            **self.vault.stats(),
            **self.peer_server.damage.stats(),
            "scrub": self.scrubber.found_count,
        }
        counts["received_bytes"] = self.peer_server.received_bytes  # of chunks, from peers
        counts["limit_why"], counts["limit_warning"] = self.limit_words
        counts |= self.guard.stats() | descriptor_stats()
        return {**counts, **self.traffic.stats(), "short_of_room": self.facts.problem or self.vault.manifests.problem}

    def _reap_loop(self) -> None:
        while not self.stopping.wait(REAP_S):
            expire = self.stager.excerpts.expire
            for work in (
                self.ranks.reap,
                self.vault.expire_pins,
                expire,
                self.peer_server.give_up_idle,
                self.idle.keep,
            ):
                self.logged(work)
            self.logged(self._look_for_room)
            self.logged(self.guard.look)

    def _look_for_room(self) -> None:
        """Write the facts for which there was none (R16); say so no longer where there is some again."""
        with self._session_lock:
            self.facts.retry()
        self.vault.manifests.look_for_room()

    # -- for the parts ------------------------------------------------------------------------

    def logged(self, work: Callable[..., None], *args: Any) -> None:
        """Do some work; a failure is logged and ends nothing."""
        try:
            work(*args)
        except Exception:
            log.exception("host %s: order %s failed", self.info.host_id, work.__name__)

    def sealed(self, copy: Copy | Shelved, put: dict[str, Any] | None = None) -> None:
        """Report a copy as it is now, whole or with the chunks it lacks; nothing if it was dropped meanwhile.

        Queued under the vault's lock, as inventories and what was freed are: the controller hears of them in the order
        in which they were true.
        """
        self.idle.used()
        with self.vault.lock:
            shelved = self.vault.shelf.find(copy.shard, copy.spec.digest)
            if shelved is not None and not shelved.is_doomed:
                body = {"copies": [copy_to_wire(sealed_copy(shelved, self.info.host_id))]}
                self.report("sealed", body if put is None else {**body, "put": put})

    def freed(self, order: dict[str, Any]) -> None:
        """Report that an order to drop copies was carried out."""
        with self.vault.lock:
            self.report("freed", {"shards": order["shards"], "number": order.get("number")})

    def _copy_sealed(self, copy: Copy) -> None:
        """Report a copy that a peer sent, then compare it with what our own ranks put."""
        self.sealed(copy)
        self.twins.compare(copy.shard)
