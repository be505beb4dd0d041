"""What is whole without Ray: decided from arenas alone, or from places into which hosts wrote what they had. Pure.

A new controller's machine is shown the journals and the copies, as at a take-over (R16), and asked nothing else: so it
says which steps count, and the planner which of them is whole, and why no newer one (R24). None of its orders is
carried out. Shells bring the bytes: `shell/arena/offline.py` of arenas, `exchange/salvaging.py` of places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from memstore.core.arena.parity_rows import add_into
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Job
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest, shard_digest, spec_of
from memstore.core.journal.records import Entry, entries_of, entry_from_record, is_part, part_from_record
from memstore.errors import ConfigError, IntegrityError, ProtocolError
from recovery.inventory import Copy, ShardSpec, StepId
from recovery.lineage import AttemptFact, lineage
from recovery.planner import RecoveryPlan, plan

_FIRST_LINE = b"memstore-facts 1\n"


@dataclass(frozen=True, slots=True)
class KnownShard:
    """A shard, or parity, of which the manifest is there."""

    manifest: Manifest
    data: bytes  # of the manifest
    spec: ShardSpec

    @classmethod
    def of(cls, data: bytes) -> KnownShard:
        """Read a manifest; ProtocolError or ManifestMismatch if it is none."""
        manifest = decode_manifest(data)
        return cls(manifest, data, spec_of(manifest, shard_digest(data)))

    @property
    def step(self) -> StepId:
        """Return its step."""
        return StepId(self.manifest.shard.attempt, self.manifest.shard.step)

    def __str__(self) -> str:
        shard = self.manifest.shard
        return f"{'parity' if shard.is_parity else 'shard'} of rank {shard.rank}, step {shard.step} of {shard.job}"


class SalvagedFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a host knew of a step that was salvaged from it; in a file: a first line, msgpack, the digest of both."""

    host: str
    records: tuple[bytes, ...]  # of its journal, about the job, with its parts
    manifests: tuple[bytes, ...]  # of all shards of the step that it had, whole or not

    @property
    def entries(self) -> list[Entry]:
        """Return the facts, without those that cannot be read."""
        return entries_of(self.host, readable(self.records))

    def encode(self) -> bytes:
        """Return the file's bytes."""
        data = _FIRST_LINE + msgspec.msgpack.encode(self)
        return data + chunk_digest(data)

    @classmethod
    def decode(cls, data: bytes) -> SalvagedFacts:
        """Return what a file says; IntegrityError if it is not what `encode` made."""
        body, digest = data[:-16], data[-16:]
        if not body.startswith(_FIRST_LINE) or chunk_digest(body) != digest:
            raise IntegrityError(f"{len(data)} bytes are not facts of a host, or are torn or of another version")
        try:
            return _FACTS.decode(body[len(_FIRST_LINE) :])
        except (ValueError, msgspec.MsgspecError) as error:
            raise IntegrityError(f"facts of a host with a sound digest and bad contents: {error}") from error


_FACTS = msgspec.msgpack.Decoder(SalvagedFacts)


def readable(records: Iterable[bytes]) -> list[bytes]:
    """Return a journal's records without those that cannot be read."""
    found: list[bytes] = []
    for record in records:
        with contextlib.suppress(ProtocolError):
            part_from_record(record) if is_part(record) else entry_from_record(record)
            found.append(record)
    return found


def check_same_run(job: str, here: Iterable[Entry], there: Iterable[Entry] | Mapping[int, float], where: str) -> None:
    """Raise ConfigError if an attempt was opened at two moments: two runs of this name, which must not be mixed (R31).

    `there`: a journal's facts, or the moments that a marker has.
    """
    opened, others = _opened(here), there if isinstance(there, Mapping) else _opened(there)
    for attempt in sorted(opened.keys() & others.keys()):
        if opened[attempt] != others[attempt]:
            raise ConfigError(
                f"{where} has another run of job {job!r}: its attempt {attempt} was opened at {others[attempt]:.0f} s, "
                f"this one's at {opened[attempt]:.0f} s of the wall clock: name another place for this run",
                value=where,
            )


def _opened(entries: Iterable[Entry]) -> dict[int, float]:
    facts = (entry.fact for entry in entries)
    return {fact.attempt: fact.wall_s for fact in facts if isinstance(fact, AttemptOpened)}


def jobs_of(journals: Iterable[Iterable[Entry]], copies: Iterable[Copy]) -> dict[str, Job]:
    """Return the jobs that a new controller would know from these journals and copies."""
    machine = ControllerMachine(term=1, now=0.0, wall_offset_s=0.0, rules=Rules())
    for fact in machine.parts.journal.log.adopt(journals):
        machine.apply(fact, is_replay=True)
    for copy in copies:
        machine.parts.steps.take_copy(copy)
    for job in machine.jobs.values():
        job.prove()
    return dict(machine.jobs)


def choose(job: Job, *, has_uncommitted: bool = False) -> RecoveryPlan:
    """Return the plan of a launch that began now: the newest whole step of its lineage, or why there is none (R24).

    Args:
        job: As `jobs_of` returns it.
        has_uncommitted: Count steps that were never committed, as far as is known here.
    """
    parts = [copies for ranks in (*job.copies.values(), *job.parity.values()) for copies in ranks.values()]
    found = job.inventory(live={host for copies in parts for host in copies}, silent=())
    number, own = job.newest_number + 1, job.attempts.values()
    attempts = {a.attempt_number: AttemptFact(a.attempt_number, a.parent, a.parent_step, a.world_size) for a in own}
    spans = lineage({**attempts, number: AttemptFact(number, job.parent_for_next(), None, 0)}, number)
    sizes = (copy.spec.world_size for copy in found.copies)
    size = job.newest.world_size if job.newest is not None else next(sizes, 0)
    ranks = dict.fromkeys(range(size), "")
    newest = plan(found, spans, world_size=size, rank_hosts=ranks)
    if has_uncommitted or newest.step is None or newest.step in job.commits:
        return newest
    counted = tuple(copy for copy in found.copies if StepId(copy.shard.attempt, copy.shard.step) in job.commits)
    chosen = plan(replace(found, copies=counted), spans, world_size=size, rank_hosts=ranks)
    words = f"attempt {newest.step.attempt} step {newest.step.step} is whole, and no journal that is here says that it "
    return replace(chosen, why=f"{chosen.why}; {words}was committed: --uncommitted takes it")


def decode_row(parts: Iterable[tuple[bytes | bytearray, int]], nbytes: int) -> bytes:
    """Return the chunk that rows and chunks add up to, each times its factor (`ParitySet.decoding`)."""
    total = bytearray(nbytes)
    for data, factor in parts:
        add_into(memoryview(total), nbytes, memoryview(data)[:nbytes], factor)
    return bytes(total)
