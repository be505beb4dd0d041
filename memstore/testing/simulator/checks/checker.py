"""The invariants, looked at after every event: what is in every memory, what ranks are told, what they are given.

The checker knows the ground truth: which bytes were handed over, what lies in which memory, which fault did what. It
never asks the catalog whether the catalog is right; only `claims_redundancy` asks what is claimed, to hold it to that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from memstore.core.arena.replica_index import Shelved
from memstore.core.arena.slot_table import SlotState
from memstore.core.cluster.facts import StepCommitted
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest
from memstore.core.journal.records import entry_from_record, place_of_record
from memstore.testing.simulator.checks.kept_copies import newest_there
from recovery.inventory import ShardId, StepId

if TYPE_CHECKING:
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.rank.rank import SimRank
    from memstore.testing.simulator.world.control import Controller
    from memstore.testing.simulator.world.memory import Memory
    from memstore.testing.simulator.world.world import Simulation

Body = dict[str, Any]
SEALED = 3
NEWCOMER_S = 2.0  # a host that joined this lately may not have a fact that spread before
COMMITS_WANTED = 3
_entry = functools.lru_cache(1 << 14)(entry_from_record)  # after each of its writes a whole journal is looked at
REPAIR_S = 12.0  # a calm store has its newest step back at full redundancy within this, also between two steps (R29)


class Violation(AssertionError):
    """A rule or invariant was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Checker:
    """What is true of one simulation, and what must be."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.cause = ""  # the fault that is being injected, while it is
        self.contents: dict[ShardId, list[list[bytes]]] = {}
        self.facts: dict[StepId, StepCommitted] = {}
        self.terms: dict[StepId, int] = {}  # commit -> the term that wrote it
        self.journals: dict[StepId, set[str]] = {}  # commit -> hosts that ever had its fact
        self.acked: set[StepId] = set()
        self.decided: dict[tuple[int, str], StepId | None] = {}  # by attempt, used again once all is lost, and key
        self.orders: dict[int, set[tuple[int, ...]]] = {}  # attempt -> orders of its ranks
        self.seated: dict[tuple[int, int], SimRank] = {}  # (attempt, rank) -> who was told to be it
        self.ever: dict[tuple[ShardId, str], set[str]] = {}  # copy -> hosts that ever had all of it, spoilt or not
        self.whole: dict[str, set[tuple[ShardId, str]]] = {}
        self.believed: dict[str, set[tuple[ShardId, str]]] = {}  # rot counts: it is found, and heard of, later
        self.steps_put = self.restores = self.acked_after_heal = 0
        self._seen: dict[str, int] = {}
        self.is_healed = False
        self._fenced: dict[tuple[SimHolder, str], int] = {}  # what a holder has answered (R21)
        self._short: tuple[StepId | None, float] = (None, 0.0)  # the newest commit and since when it lacks copies
        self.degraded = ""  # why the newest commit is

    # -- memory -------------------------------------------------------------------------------

    def after_event(self) -> None:
        """Look at every memory that changed."""
        for name, memory in self.world.memories.items():
            if self._seen.get(name) != memory.version:
                self._seen[name] = memory.version
                self._look(name, memory)

    def _look(self, name: str, memory: Memory) -> None:
        holder = self.world.holders.get(name)
        if holder is not None and holder.is_up and not memory.is_cut:
            self._look_at_table(holder)
        sealed: set[bytes] = set()
        good: set[bytes] = set()
        for number, header in enumerate(memory.headers):
            if int(header.state) != SEALED:
                continue
            sealed.add(digest := bytes(header.digest))
            if number in memory.spoilt:
                continue
            if chunk_digest(memoryview(memory.slots[number])[: header.nbytes]) != digest:
                raise Violation("R6", f"sealed slot {number} of {name} holds other bytes than its digest says")
            good.add(digest)
        whole: set[tuple[ShardId, str]] = set()
        believed = self.believed[name] = set()
        for file_name, data in memory.manifests.items():
            manifest, digest_text, wanted = _decoded(data)
            strange = self.world.history.look(name, manifest) if manifest.shard.job != self.world.scenario.job else ""
            if strange:
                raise Violation("R32", strange)
            if not wanted <= sealed | memory.hurt:
                raise Violation("R7", f"a manifest of {manifest.shard} on {name} names chunks that no slot holds")
            if name not in self.ever.setdefault((manifest.shard, digest_text), set()) and wanted <= sealed:
                self.ever[manifest.shard, digest_text].add(name)
            believed.add((manifest.shard, digest_text))
            if wanted <= good and file_name not in memory.rotten:
                whole.add((manifest.shard, digest_text))
        before, self.whole[name] = self.whole.get(name, set()), whole
        for shard, shard_digest_text in before - whole if self.world.scenario.is_strict else ():
            if self.cause:
                self.world.history.taken[name, shard] = self.world.now
            else:
                self._dropped(name, shard, shard_digest_text)

    def _look_at_table(self, holder: SimHolder) -> None:
        try:
            holder.vault.table.validate()
        except AssertionError as exc:
            raise Violation("R6", f"slot table of {holder.host_id}: {exc}") from exc
        for (shard, sender, *_), draft in holder.vault.shelf.drafts.items():
            if sender in self.world.holders and draft.attempt < self._fenced.get((holder, shard.job), 0):
                raise Violation("R21", f"{holder.host_id} receives {shard} of {sender} in a fenced attempt")
        for rank in self.world.ranks:
            if rank.holder is holder and not rank.is_dead:
                for number in (*rank.pool, *rank.in_copy):
                    slot = holder.vault.table.slots[number]
                    if slot.state is not SlotState.LEASED or slot.owner != rank.owner:
                        raise Violation(
                            "R8", f"rank {rank.rank} may write slot {number} of {holder.host_id}, "
                            f"which is {slot.state.name} of {slot.owner}"
                        )  # fmt: skip

    def adopted(self, holder: SimHolder) -> None:
        """A holder took a memory over: what a fault had spoilt is not among what it will serve (R6)."""
        for number in sorted(holder.memory.spoilt):
            if int(holder.memory.headers[number].state) == SEALED:
                raise Violation("R6", f"{holder.host_id} adopted slot {number}, whose bytes are not its digest's")

    def reads(self, holder: SimHolder, shelved: Shelved, index: int) -> None:
        """A pinned replica is read: its slots are its own until the reader is done (R7)."""
        number = shelved.slots[index]
        if number is not None and bytes(holder.memory.headers[number].digest) != shelved.digests[index]:
            raise Violation("R7", f"slot {number} of {holder.host_id} was reused while {shelved.shard} was read")

    def _dropped(self, host: str, shard: ShardId, digest: str) -> None:
        """A copy went without a fault: never one of the newest committed step that others do not have (R19, R29)."""
        if broken := self.world.history.dropped(host, shard):
            raise Violation("R19", broken)
        step = StepId(shard.attempt, shard.step)
        newest = max(self.facts, default=None)
        if newest is None or step != newest or shard.job != self.world.scenario.job:
            return
        left = sorted(h for h, believed in self.believed.items() if (shard, digest) in believed)
        left += self.world.history.taken_meanwhile(host, shard)
        if len(left) < self.world.scenario.replicas:
            raise Violation("R19", f"{host} dropped {shard}, the newest committed; copies left: {left}")

    # -- puts and commits -----------------------------------------------------------------------

    def handed_over(self, shard: ShardId, content: list[bytes]) -> None:
        """A rank has put these bytes."""
        self.contents.setdefault(shard, []).append(content)
        self.steps_put += 1

    def fence_answered(self, holder: SimHolder, job: str, attempt: int) -> None:
        """A holder says that it refuses older attempts from now on (R21)."""
        self._fenced[holder, job] = max(attempt, self._fenced.get((holder, job), 0))

    def sealed_here(self, holder: SimHolder, shard: ShardId, digests: Sequence[bytes]) -> None:
        """A holder stored what a rank of its own handed over: its bytes (R8), in no fenced attempt (R21)."""
        if list(digests) not in [[chunk_digest(data) for data in put] for put in self.contents[shard]]:
            raise Violation("R8", f"{holder.host_id} sealed other bytes of {shard} than its rank put")
        if shard.attempt < self._fenced.get((holder, shard.job), 0):
            raise Violation("R21", f"{holder.host_id} sealed {shard} although it had answered a newer fence")

    def journalled(self, holder: SimHolder) -> None:
        """Facts were written beside an arena; never those of a lower term after a higher one (R17)."""
        terms = [place_of_record(record)[0] for record in holder.memory.journal]
        if terms and terms[-1] < max(terms):
            raise Violation("R17", f"{holder.host_id} took a fact of term {terms[-1]} after one of {max(terms)}")
        for record in holder.memory.journal:
            entry = _entry(record)
            fact = entry.fact
            self.world.natural.journalled(holder.host_id, fact)
            if isinstance(fact, StepCommitted) and fact.job == self.world.scenario.job:
                step = StepId(fact.attempt, fact.step)
                self.facts[step], self.terms[step] = fact, entry.term
                self.journals.setdefault(step, set()).add(holder.host_id)

    def told_committed(self, rank: SimRank, step_number: int, *, is_degraded: bool) -> None:
        """A ticket hears that its step is committed: the copies and the fact must have been there (R16, R18, I4)."""
        step = StepId(rank.attempt, step_number)
        if step in self.acked or step_number not in rank.tickets:
            return
        fact = self.facts.get(step)
        if fact is None:
            raise Violation("R16", f"rank {rank.rank} was told that {step} is committed; no journal knows it")
        controller = rank.holder.session.controller if rank.holder and rank.holder.session else None
        opened = controller.sessions.values() if controller is not None else ()
        live = sum(self.world.now - session.opened_s > NEWCOMER_S for session in opened)
        # A successor acts on what its predecessor wrote, and spreads it first on every ordered session.
        is_inherited = controller is not None and self.terms[step] < controller.term
        if not is_inherited and len(self.journals[step]) < min(self.world.scenario.replicas, live):
            have = sorted(self.journals[step])
            raise Violation("R16", f"{step} was acknowledged with its fact on {have} only, {live} hosts live")
        for r, (digest, hosts) in enumerate(zip(fact.digests, fact.hosts, strict=True)):
            shard = ShardId(rank.job, step.attempt, step.step, r)
            never = sorted(set(hosts) - self.ever.get((shard, digest), set()))
            if never:
                raise Violation("I4", f"{step} was committed with copies of rank {r} that never were on {never}")
            if not fact.is_degraded and len(set(hosts)) < self.world.scenario.replicas:
                raise Violation("R18", f"{step} says it is not degraded, rank {r} has copies on {list(hosts)}")
            if not fact.is_degraded and len(self._racks(hosts)) < self.racks_wanted():
                raise Violation("R18", f"{step} says it is not degraded, rank {r} has copies in {self._racks(hosts)}")
        for other in self.world.ranks:
            if other.attempt == rank.attempt and other.tickets.get(step_number) in ("skipped", "failed"):
                raise Violation("R12", f"{step} was committed, but rank {other.rank}'s put was not done")
        for (attempt, _), restored in self.decided.items():
            if attempt > step.attempt and self.world.scenario.is_strict and (restored is None or restored < step):
                raise Violation("R21", f"{step} was committed after attempt {attempt} had restored {restored}")
        self.acked.add(step)
        self.world.starts_over = False
        self.acked_after_heal += self.is_healed
        self.degraded = fact.reason if is_degraded else ""
        self.world.natural.committed(step, fact)

    def _racks(self, hosts: Iterable[str]) -> set[str]:
        return {self.world.holders[host].info.labels.get("rack", "") for host in hosts}

    def racks_wanted(self) -> int:
        """In how many racks a shard's copies must be."""
        return self.world.scenario.replicas if self.world.scenario.racks >= self.world.scenario.replicas else 1

    def _is_even(self) -> bool:
        """True if the hosts with ranks lie so in racks that placement owes every shard its own racks."""
        hosts = {rank.host_id for rank in self.world.ranks}
        racks = Counter(self.world.holders[host].info.labels.get("rack", "") for host in hosts)
        return max(racks.values(), default=0) * self.world.scenario.replicas <= len(hosts)

    # -- gets ---------------------------------------------------------------------------------

    def read(self, rank: SimRank, body: Body) -> list[bytes]:
        """The bytes in the slots that a get's answer names, as the rank would load them."""
        return [b"" if n is None else bytes(rank.mapping[n]) for n in body["slots"]]

    def read_damaged(self, rank: SimRank, slots: list[int], staged_s: float) -> None:
        """A rank found a bad chunk in what was staged for it: that may only have happened since it was staged (R23)."""
        spoilt = self.world.memories[rank.host_id].spoilt
        early = [n for n in slots if spoilt.get(n, staged_s) < staged_s]
        if early:
            raise Violation("R23", f"rank {rank.rank} was handed slots {early}, bad before they were staged")

    def ordered(self, rank: SimRank, answer: Body) -> None:
        """A rank was renumbered: one order for the attempt, and one process for each rank (R27)."""
        orders = self.orders.setdefault(rank.attempt, set())
        orders.add(tuple(answer["order"]))
        if self.seated.setdefault((rank.attempt, rank.rank), rank) not in self.world.ranks:
            self.seated[rank.attempt, rank.rank] = rank  # another process has taken its place in the launch (R20)
        other = self.seated[rank.attempt, rank.rank]
        if len(orders) > 1 or other is not rank:
            who = f"rank {rank.rank} is {rank.nonce}, and {other.nonce}"
            raise Violation("R27", f"attempt {rank.attempt}: orders {sorted(orders)}; {who}")

    def restored(self, rank: SimRank, answer: Body) -> int:
        """A get was answered: with the bytes that were put (I3)."""
        got = self.chosen(rank, answer)
        if got is None:
            return 0
        shard = ShardId(rank.job, got.attempt, got.step, rank.rank)
        if answer["read"] not in self.contents.get(shard, []):
            raise Violation("I3", f"rank {rank.rank} was given bytes for {got} that nobody put")
        return got.step

    def chosen(self, rank: SimRank, answer: Body) -> StepId | None:
        """A get, or an agreement, has chosen: one step for all, and nothing newer was promised (I1, I2)."""
        self.restores += 1
        got = None if answer["step"] is None else StepId(int(answer["attempt"]), int(answer["step"]))
        known = self.decided.setdefault((rank.attempt, rank.key), got)
        if known != got:
            raise Violation("I2", f"attempt {rank.attempt}: rank {rank.rank} got {got}, another rank {known}")
        newest = max(self.acked, default=None)
        if self.world.scenario.is_strict and newest is not None and (got is None or got < newest):
            why = answer.get("why", "")
            raise Violation("I1", f"attempt {rank.attempt} restored {got}, {newest} had been acknowledged: {why}")
        return got

    def refused(self, rank: SimRank, verb: str, error: str) -> None:
        """A call failed: never a get for want of bytes, within the promise (I1)."""
        self.world.note(f"rank {rank.rank}: {verb} failed: {error[:160]}")
        # Others pass: a host died meanwhile, restart. And who cannot read durable storage cannot know (D23).
        is_loss = verb == "get" and "no whole step" in error and "could not be read" not in error
        self.world.starts_over |= is_loss
        if is_loss and self.world.scenario.is_strict:
            raise Violation("I1", f"attempt {rank.attempt}: get() was refused within the promise: {error[:400]}")

    # -- redundancy and the end -------------------------------------------------------------------

    def claims_redundancy(self, controller: Controller) -> bool:
        """Say whether the store claims `replicas` copies of every shard of its newest committed step."""
        job = controller.catalog.jobs.get(self.world.scenario.job)
        if job is None or not job.commits:
            return not self.acked
        newest = max(job.commits)
        fact = job.commits[newest]
        live = set(controller.catalog.hosts.live_ids())
        for rank in range(fact.world_size):
            hosts = job.copies.get(newest, {}).get(rank, {})
            have = [h for h, c in hosts.items() if h in live and not c.missing]
            if len(have) < self.world.scenario.replicas:
                return False
        return not fact.is_degraded and self.world.history.claims_redundancy(controller)

    def look_at_redundancy(self) -> None:
        """A newest step that stays without copies while nothing hinders repair is never mended (R29)."""
        newest, now = newest_there(self), self.world.now
        if newest is None or newest != self._short[0] or not self._is_calm() or not self.lacking(newest):
            self._short = (newest, now)
        elif now - self._short[1] > REPAIR_S:
            raise Violation("R29", f"for {REPAIR_S:g} s {self.lacking(newest)}, and nothing hinders repair")

    def _is_calm(self) -> bool:
        """True if every process and link works and the newest attempt trains."""
        world = self.world
        if world.served() is None or not world.has_kv or world.network.cut or world.network.slow:
            return False
        holders = world.holders.values()
        is_well = all(h.is_serving and h.session is not None and not h.memory.is_full for h in holders)
        return is_well and all(r.steps_done and not r.is_dead and not r.is_frozen for r in world.ranks)

    def healed(self) -> None:
        """From now on commits count for liveness."""
        self.is_healed = True

    def is_live(self) -> bool:
        """Commits went on, and the newest has every copy in truth (I16)."""
        return not self.why_not_live()

    def why_not_live(self) -> str:
        """Say what is still missing, or ""."""
        if self.acked_after_heal < COMMITS_WANTED:
            return f"{self.acked_after_heal} whole commits since then, wanted {COMMITS_WANTED}. {self.degraded}"
        newest = newest_there(self)
        return (self.lacking(newest) if newest is not None else "") or (
            self.world.history.lacking(self._copies_wanted()) if self.world.scenario.is_strict else ""
        )

    def _copies_wanted(self) -> int:
        return max(1, min(self.world.scenario.replicas, len(self.world.holders)))

    def trusted(self) -> list[str]:
        """Hosts that are first to hold a second copy: not those that die often (R29)."""
        controller = self.world.served()
        hosts = controller.catalog.hosts if controller is not None else None
        return [h for h in self.world.holders if hosts and not hosts.is_on_probation(self.world.now, h)]

    def lacking(self, newest: StepId) -> str:
        """Say which rank's shard of a committed step lies whole on too few hosts or in too few racks, or ""."""
        trusted, wanted = self.trusted(), self._copies_wanted()
        for rank, digest in enumerate(self.facts[newest].digests):
            shard = ShardId(self.world.scenario.job, newest.attempt, newest.step, rank)
            have = [h for h, whole in self.whole.items() if (shard, digest) in whole]
            if len(have) < wanted:
                return f"rank {rank} of {newest} is on {have}, wanted {wanted} hosts"
            if self._is_even() and len(self._racks(have)) < min(self.racks_wanted(), len(self._racks(trusted))):
                return f"rank {rank} of {newest} is on {have}, all in {self._racks(have)}"
        return ""

    def at_the_end(self) -> None:
        """All is quiet: the catalog knows what is there, and nothing is leased to or kept for the dead (I12, I18)."""
        controller = self.world.served()
        if controller is None:
            raise Violation("I16", "no controller serves at the end")
        known = {
            (copy.shard, host, copy.missing) for job in controller.catalog.jobs.values()
            for ranks in job.copies.values() for hosts in ranks.values() for host, copy in hosts.items()
        }  # fmt: skip
        held = {(c.shard, h, c.missing) for h, holder in self.world.holders.items() for c in holder.copies()}
        if known != held:
            only_held, only_known = sorted(map(str, held - known))[:3], sorted(map(str, known - held))[:3]
            raise Violation("I18", f"held but unknown: {only_held}; known but not held: {only_known}")
        for host, holder in self.world.holders.items():
            leased = {o: n for o, n in holder.vault.table.leases.items() if n}
            if leased:
                raise Violation("I13", f"{host} still leases slots to dead processes: {leased}")
            # A sender that was cut off could not say that it gave up: its draft goes when it has been idle for long.
            kept = [k for k in holder.vault.shelf.drafts if (k[1], k[0]) not in holder.peer_server.incoming]
            if kept:
                raise Violation("I13", f"{host} still has drafts {sorted(map(str, kept))[:3]}")
        why = self.why_not_live()
        if why:
            raise Violation("I16", f"at the end {why}")


@functools.lru_cache(1 << 14)
def _decoded(data: bytes) -> tuple[Manifest, str, frozenset[bytes]]:
    manifest = decode_manifest(data)
    return manifest, shard_digest(data), frozenset(chunk.digest for chunk in manifest.chunks)
