"""The holder: owns one host's arena, serves its ranks and peers, obeys the controller (R2-R4, R17, R21, R28).

A plain object with threads; `actors.py` wraps it in a Ray actor and `testing/` in a process. It only composes: its
parts share a context (context.py), from which none of them can reach another, and each is given the parts below it.
It decides nothing: what to push, stage, drop or fence is ordered by the controller (see core/wire/messages.py), what
may be received is said by core/arena/replica_index.py. It never imports torch or ray.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.arena.claimed_memory import Limit
from memstore.core.holder.inventory import inventory, report_copy
from memstore.core.holder.orders import obey
from memstore.core.holder.puts import equal_ranks
from memstore.core.holder.puts.push import WHOLE_BYTES
from memstore.core.holder.sessions import JobFences, read_journal
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.calls import Called, RankCall
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ControllerIdentity, HolderIdentity, Identity, ReaderIdentity
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import CallAnswered, HostNews, Order, TakeIncarnation
from memstore.core.wire.rank_messages import ToolHello
from memstore.core.wire.reports import Heartbeat, HostInventory
from memstore.core.wire.status_rows import HostStats
from memstore.errors import PeerUnreachable, TransportError
from memstore.shell.arena.arena import of_this_release, open_store
from memstore.shell.arena.folder import IdleTime, make_folder, next_incarnation, write_secret
from memstore.shell.arena.journal_file import JournalFile
from memstore.shell.arena.lock import ArenaLock, LockOwner, is_alive
from memstore.shell.arena.memory_limits import admission, beyond_limit, measure
from memstore.shell.holder.blocking_io import BlockingIo
from memstore.shell.holder.context import HolderContext, PeerTable, RankConnections
from memstore.shell.holder.controller_session import ControllerSessions
from memstore.shell.holder.folder_guard import FolderGuard
from memstore.shell.holder.hardware import HardwareErrors
from memstore.shell.holder.pending_calls import Calls, TrainedSteps
from memstore.shell.holder.rank_server import RankServer
from memstore.shell.holder.scrub import Scrubber
from memstore.shell.holder.send_gate import SendGate
from memstore.shell.identity import HostIdentity, resolve_interfaces
from memstore.shell.native.extension import problem as native_problem
from memstore.shell.net.channel import Channel, Pacing
from memstore.shell.net.listener import Listener, connect_unix
from memstore.shell.net.tls import Tls
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.client import PeerClient
from memstore.shell.peer.outgoing_shard import OutgoingShards
from memstore.shell.peer.parity import ParityServer
from memstore.shell.peer.server import PeerServer
from memstore.shell.threads import RankPriority
from recovery.inventory import Copy, ShardId

# -- descriptors --------------------------------------------------------------------------------------
# The file descriptors of this process: how many it has open, and how many it may (RLIMIT_NOFILE).


def descriptor_stats() -> dict[str, int]:
    """Return the counts and the process id; if no descriptor is left to count with, report all in use."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux knows no infinite one
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # its own
    except OSError:
        used = limit
    return {"descriptors": used, "descriptors_limit": limit, "descriptors_hard": hard, "pid": os.getpid()}


def _limit(folder: Path, config: Config, arena_limit_bytes: int, words: str) -> Limit:
    return Limit(
        arena_limit_bytes,
        words,
        beyond_limit(words),
        lambda asked, claimed: admission(
            measure(config.arena_dir, folder=folder), asked_bytes=asked, claimed_bytes=claimed
        ),
        config.quotas,
    )


# -- holder -------------------------------------------------------------------------------------------


log = logging.getLogger("memstore")
REAP_S = 0.25  # how often dead owners of leases are looked for
FROZEN_AFTER_S = 2.0  # a lock owner that does not answer its socket for this long is replaced (R2)
LOCK_TIMEOUT_S = 10.0


def collect_only_new() -> None:
    """For a process that is a holder, once it serves: leave what its start made out of the collector's walks.

    A walk over all that is imported takes 40 ms, and parity makes objects enough for one in most puts: 20 ms a put.
    """
    gc.collect()
    gc.freeze()


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
        self.config, self.secret, self.tls = config, secret, Tls.load(config)
        self.limit_words = limit_words  # what set the limit; a warning if it is small
        self.folder = of_this_release(make_folder(config.arena_dir, store=config.store, host=identity.host_id))
        lock_file = ArenaLock.take(
            self.folder, timeout_s=LOCK_TIMEOUT_S, cluster=cluster, replace_frozen=self._is_frozen
        )
        write_secret(self.folder, secret)
        self.idle = IdleTime(self.folder)
        limit = _limit(self.folder, config, arena_limit_bytes, limit_words[0])
        self.replicas = open_store(self.folder, chunk_bytes=config.chunk_bytes, limit=limit)
        self.journal = JournalFile.open(self.folder / "journal")
        self.fences = JobFences()
        term = read_journal(self.journal.records(), self.fences)
        self.sessions = ControllerSessions(identity.host_id, self.journal, term)
        info = HostInfo(
            identity.host_id,
            next_incarnation(self.folder),
            (),
            identity.machine,
            identity.is_explicit,
            dict(identity.labels),
            arena_limit_bytes,
        )
        self._identity = HolderIdentity(host=identity.host_id, incarnation=info.incarnation)  # for peers
        self.damage, self.pacing = Damage(), Pacing(config.dscp, config.replicate_bytes_per_s, config.chunk_bytes)
        self.peers, self.stopping = PeerTable(identity.host_id, self._connection_pool), threading.Event()
        self.priority, self.calls = RankPriority(), Calls(self._relay)
        self.state = self._make_state(info)
        self.context = HolderContext(
            self.state, config, self.folder, self.replicas, self.peers, on_fatal, self.stopping
        )
        self.replicas.on_damaged = partial(report_copy, self.state)
        for note in self.replicas.adoption_notes:
            log.info("host %s: %s", identity.host_id, note)
        self.warnings = _warnings(identity.host_id, limit_words[1], self.replicas.arena.headers.put_aside)
        self._compose()
        self.listeners: list[Listener[Identity]] = []
        lock_file.describe(cluster=cluster, address=str(self._listen()))
        self.rank_listener = Listener.unix(self.folder / "holder.sock", on_channel=self.ranks.serve)
        self.guard = FolderGuard(
            self.context,
            lock_file,
            self.journal,
            secret,
            records=self.sessions.journal_records,
            incarnation=lambda: self.state.info.incarnation,
            on_lost=self._say_last_word,
        )
        self._threads = self._start_loops()

    def _make_state(self, info: HostInfo) -> HolderState:
        config = self.config
        return HolderState(
            info,
            self.replicas,
            OutgoingShards(self.replicas).outgoing,
            Limits(config.suspect_after_s, config.dead_after_s, WHOLE_BYTES),
            now=time.monotonic,
            report=self.sessions.report,
            ask=self.calls.ask_own,
            is_stopping=self.stopping.is_set,
            is_alive=lambda owner: is_alive(owner.pid, owner.start),
            pin_numbers=itertools.count(secrets.randbits(60)),
            idle_s=self.idle.idle_s,
            fences=self.fences,
        )

    def _listen(self) -> Endpoint:
        """Accept controllers and peers from now on, on every network; return where, on the first."""
        try:
            for address in resolve_interfaces(self.config.interface):
                self.listeners.append(
                    Listener.tcp(
                        address,
                        self.config.port,
                        secret=self.secret,
                        store=self.config.store,
                        identity=lambda: self._identity,
                        on_channel=self._accept,
                        tls=self.tls,
                    )
                )
        except BaseException:
            for listener in self.listeners:
                listener.close()
            raise
        endpoints = tuple(Endpoint(str(each.address[0]), int(each.address[1])) for each in self.listeners)
        self.state.info = replace(self.state.info, endpoints=endpoints)
        return endpoints[0]

    def _compose(self) -> None:
        """Make the parts, each from the context and from parts made before it."""
        context = self.context
        self.trained, self.scrubber = TrainedSteps(), Scrubber(context)
        self.hardware = HardwareErrors(self.stopping)
        self.send_gate = SendGate(self.folder)
        parity = ParityServer(
            self.replicas,
            context.host_id,
            is_fenced=self.fences.is_fenced,
            on_sealed=self._copy_sealed,
            damage=self.damage,
            reach=self.peers.peer,
        )
        connections = RankConnections(context)
        self.io = BlockingIo(context, connections, self.send_gate, self.calls, self.trained, self.scrubber, parity)
        self.ranks = RankServer(context, self.io, self.calls, self.send_gate, self.trained, self.damage)
        self.peer_server = PeerServer(
            self.replicas,
            context.host_id,
            is_fenced=self.fences.is_fenced,
            on_sealed=self._copy_sealed,
            parity=parity,
            before_offer=self._before_offer,
            damage=self.damage,
        )

    def _relay(self, number: int, request: RankCall) -> None:
        """Send the controller a rank's call, or one of the holder's own."""
        self.sessions.report(Called(id=number, call=request))

    def _connection_pool(self, host: str, endpoints: tuple[Endpoint, ...]) -> PeerClient:
        return PeerClient(
            host,
            endpoints,
            secret=self.secret,
            store=self.config.store,
            identity=self._identity,
            streams=self.config.streams,
            damage=self.damage,
            pacing=self.pacing,
            tls=self.tls,
        )

    def _start_loops(self) -> list[threading.Thread]:
        loops = {"heartbeat": self._heartbeat_loop, "reap": self._reap_loop}
        loops |= {"scrub": self.scrubber.run, "hardware": self.hardware.run}
        threads = [threading.Thread(target=run, name=f"memstore-{name}", daemon=True) for name, run in loops.items()]
        for thread in threads:
            thread.start()
        return threads

    def stop_serving(self) -> None:
        """End every connection: from now on this holder sends and receives nothing."""
        self.stopping.set()
        self.io.wake()
        for listener in self.listeners:
            listener.close()
        self.rank_listener.close()
        self.sessions.close()
        self.io.close()
        self.peers.close()

    def close(self) -> None:
        """Stop serving and give up the lock; the arena stays (R5)."""
        self.stop_serving()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self.journal.close()
        self.replicas.close()
        self.idle.close()
        self.guard.lock_file.release()

    def _is_frozen(self, owner: LockOwner) -> bool:
        """Say whether the lock's live owner has stopped answering on its own socket (R2)."""
        try:
            with contextlib.closing(connect_unix(self.folder / "holder.sock", timeout_s=FROZEN_AFTER_S)) as channel:
                hello = ToolHello(nonce="lock-probe", life=0, pid=0)
                channel.send(Kind.EVENT, 0, hello, deadline_s=FROZEN_AFTER_S)
                channel.recv(timeout_s=FROZEN_AFTER_S)
            return False
        except TransportError:
            return True

    # -- connections --------------------------------------------------------------------------

    def _accept(self, channel: Channel, identity: Identity) -> None:
        if isinstance(identity, ControllerIdentity):
            self.sessions.serve(
                channel,
                identity.term,
                inventory=self._inventory,
                heartbeat=self.heartbeat,
                on_open=self.calls.ask_again,
                obey=self.obey,
            )
        elif isinstance(identity, HolderIdentity):
            self.peer_server.serve(channel, identity)
        elif isinstance(identity, ReaderIdentity):
            self.peer_server.serve_reader(channel)

    def _inventory(self) -> HostInventory:
        """Return what a controller must know of this host first (R16)."""
        if not self.state.info.endpoints:  # a controller that knows the port of the life before has come first
            raise PeerUnreachable(f"the holder of host {self.state.host_id} is just beginning: connect again")
        return inventory(self.state, self.sessions.journal_records())

    def obey(self, order: Order) -> None:
        """Carry out one order; work that can block is passed to another thread."""
        match order:
            case CallAnswered():
                self.ranks.answer(order.id, order.reply, order.error)
            case TakeIncarnation():
                threading.Thread(target=self.context.logged, args=(self.begin_again, order.above), daemon=True).start()
            case _:
                if isinstance(order, HostNews):
                    self.set_view(order)
                with self.io.state():
                    at_once = obey(self.io, self.state, order)
                if at_once is not None:
                    self.io.finish(at_once)

    def set_view(self, view: HostNews) -> None:
        """Take the addresses of hosts (`PeerTable`), and abort what hosts that are not among them were sending."""
        self.peer_server.keep_senders(self.peers.set_view(view))

    def begin_again(self, above: int) -> None:
        """Take a higher incarnation: the controller knows of a later life of this host, whose folder was lost (R3)."""
        before, number = self.state.info.incarnation, next_incarnation(self.folder, above)
        log.warning(
            "host %s: the controller refused incarnation %d, it has seen %d: going on as %d",
            self.state.host_id,
            before,
            above,
            number,
        )
        self.state.info = replace(self.state.info, incarnation=number)
        self._identity = HolderIdentity(host=self.state.host_id, incarnation=number)
        self.peers.forget()  # they know the old incarnation; the next session brings their addresses again
        self.sessions.close()

    def _copy_sealed(self, copy: Copy) -> None:
        """Report a copy that a peer sent, then compare it with what our own ranks put."""
        report_copy(self.state, copy)
        self.io.run(equal_ranks.compare, self.state, copy.shard)

    def _before_offer(self, shard: ShardId) -> None:
        """Wait until a peer's offer of a new put may be answered."""
        self.io.run(equal_ranks.await_own, self.state, shard)

    # -- periodic work --------------------------------------------------------------------------

    def _heartbeat_loop(self) -> None:
        """Send heartbeats, on a thread of its own that touches no bulk data (R28)."""
        while not self.stopping.wait(self.config.heartbeat_s):
            self.sessions.beat(self.heartbeat)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of this moment."""
        counts: dict[str, Any] = {
            **self.replicas.stats(),
            **self.damage.stats(),
            **self.guard.stats(),
            **descriptor_stats(),
            **self.hardware.counts,
            "spilled_bytes": self.send_gate.spilled_bytes,
        }
        stats = HostStats(
            **counts,
            scrub=self.scrubber.found_count,
            limit_why=self.limit_words[0],
            limit_warning=self.warnings,
            received_bytes=self.peer_server.received_bytes + self.peer_server.parity.received_bytes,
            short_of_room=self.sessions.facts.problem or self.replicas.manifests.problem,
            behind_ranks=self.priority.behind,
            verified_bytes=self.scrubber.verified_bytes,
        )
        return Heartbeat(stats=stats, trained=self.trained.newest(), clock_s=None)

    def _reap_loop(self) -> None:
        while not self.stopping.wait(REAP_S):
            for work in (
                self.ranks.reap,
                self.ranks.expire_reads,
                self.peer_server.give_up_idle,
                self.idle.keep,
                self.sessions.write_waiting,
                self.replicas.manifests.look_for_room,
                self.guard.look,
                self._follow_ranks,
            ):
                self.context.logged(work)

    def _follow_ranks(self) -> None:
        with self.context.changed:
            pids = {link.owner.pid for link in self.state.ranks.links.values() if link.job}
        self.priority.follow(pids)

    def _say_last_word(self) -> None:
        """Send the controller a last heartbeat, then end every connection."""
        self.sessions.beat(self.heartbeat)
        self.stop_serving()


def _warnings(host_id: str, limit_warning: str, put_aside: str) -> str:
    """Return what status says of the host for as long as its holder lives; what is new is logged."""
    found = [text for text in (put_aside, native_problem()) if text]
    for text in found:
        log.warning("host %s: %s", host_id, text)
    return "; ".join([*filter(None, [limit_warning]), *found])
