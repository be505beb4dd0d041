"""Out of arenas without Ray, and together again: durable files of what each host had, then one whole step (R31, R37).

    <place>/<job>/<attempt>/<step>/facts-*     what a host knew of the step (`core/salvage.py`), written first
                                   rank-*      slices of shards and of parity, as durable storage has them
                                   marker      once `merge` has written the step whole

Hosts may write into places of their own, or all into one. Every file appears whole; one that is there is not written
again, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memstore.core.durable.paths import facts_name, is_step_file, slice_name
from memstore.core.durable.slice_format import slice_chunks, slice_range, slices_count
from memstore.core.format.manifest import chunk_digest, summand_manifest
from memstore.core.journal.records import Entry, with_parts
from memstore.core.salvage import KnownShard, SalvagedFacts, check_same_run, choose, decode_row, jobs_of
from memstore.errors import CapacityError, ConfigError, IntegrityError, RecoveryError
from memstore.exchange import Progress
from memstore.shell.arena.offline import OfflineArena
from memstore.shell.durable.tier import PartsTier, files_from_url
from recovery.candidates import name_some
from recovery.inventory import Copy, DurableMarker, StepId
from recovery.parity import set_of


def open_place(url: str) -> PartsTier:
    """Return a folder, or what lies at an object store's URL, as durable storage without key or compression."""
    return PartsTier(files_from_url(url if "://" in url else str(Path(url).absolute())))


def places_in(job: str, urls: Iterable[str]) -> list[PartsTier]:
    """Return the places that may have a job: URLs, folders with its folder, and of others those in them that have."""
    found: list[str] = []
    for url in urls:
        is_place = "://" in url or (Path(url) / job).is_dir()
        found += [url] if is_place else sorted(str(path.parent) for path in Path(url).glob(f"*/{job}/"))
    return [open_place(url) for url in found]


# -- out ----------------------------------------------------------------------------------------------


def salvage(arena: OfflineArena, place: PartsTier, job: str | None, progress: Progress) -> dict[str, Any]:
    """Write what is whole in an arena, newest steps first, and keep what is there; return what is there of it.

    Raises:
        ConfigError: another run of the job is there, or nothing can be written there.
        CapacityError: no room is left there; what was written is whole, and the same call goes on with the rest.
    """
    done: dict[str, Any] = {"host": arena.host, "whole": 0, "parity": 0, "nbytes": 0, "torn": []}
    shards = [each for each in arena.shards if job in (None, each.manifest.shard.job)]
    for name in sorted({each.manifest.shard.job for each in shards}):
        about = [entry for entry in arena.entries if getattr(entry.fact, "job", None) == name]
        _check_place(name, about, place)
        for step in sorted({each.step for each in shards if each.manifest.shard.job == name}, reverse=True):
            mine = [each for each in shards if (each.manifest.shard.job, each.step) == (name, step)]
            facts = SalvagedFacts(arena.host, with_parts(about, arena.host), tuple(each.data for each in mine))
            try:
                _write(place, name, step, facts_name(arena.store, arena.host), facts.encode())
                for each in sorted(mine, key=lambda each: each.manifest.shard.is_parity):
                    _write_shard(arena, place, each, done, progress)
            except CapacityError as error:
                raise CapacityError(
                    f"{error}; {done['whole']} shards of {arena.host} are whole there and can be imported, and the "
                    "same command goes on once there is room",
                    nbytes=done["nbytes"],
                ) from error
    return done


def _write(place: PartsTier, job: str, step: StepId, name: str, data: bytes) -> None:
    place.files.write(job, step, name, [data], should_stop=lambda: False, is_once=False)


def _write_shard(
    arena: OfflineArena, place: PartsTier, known: KnownShard, done: dict[str, Any], progress: Progress
) -> None:
    shard, spec, bad = known.manifest.shard, known.spec, 0
    there = place.files.names(shard.job, known.step)
    for number in range(slices_count(spec)):
        here = slice_range(spec, number)
        progress(sum(map(spec.chunk_nbytes, here)))
        if slice_name(shard.rank, number, spec.digest) in there:
            continue
        chunks = [arena.chunk(known.manifest.chunks[index]) for index in here]
        whole = [chunk for chunk in chunks if chunk is not None]
        bad += len(chunks) - len(whole)
        if len(whole) == len(chunks):
            wrote = place.write_slice(shard, spec, number, known.data, whole, should_stop=lambda: False)
            done["nbytes"] += wrote or 0
    done["whole"] += not bad
    done["parity"] += not bad and shard.is_parity
    if bad and not arena.is_dropped(known):
        done["torn"].append(f"{known}: {bad} of {spec.chunks_count} chunks match no digest")


def _check_place(job: str, entries: Sequence[Entry], place: PartsTier) -> None:
    """Raise ConfigError if another run of the job was written there, salvaged or durable."""
    for _, facts in _facts_in(place, job):
        check_same_run(job, entries, facts.entries, place.files.where)
    for record in place.marker_records(job)[0]:
        check_same_run(job, entries, dict(record.lineage.attempts), place.files.where)


def _facts_in(place: PartsTier, job: str) -> Iterator[tuple[StepId, SalvagedFacts]]:
    """Yield what hosts knew of the steps of a job that lie there; what is damaged is passed over."""
    for step in place.files.steps(job)[0]:
        for name in sorted(place.files.names(job, step)):
            if name.startswith("facts-") and is_step_file(name):
                with contextlib.suppress(IntegrityError), place.files.opened(job, step, name) as reader:
                    data = bytearray(reader.nbytes)
                    reader.read_into(0, memoryview(data))
                    yield step, SalvagedFacts.decode(bytes(data))


# -- in -----------------------------------------------------------------------------------------------


class Salvaged:
    """The places of one job's salvage, read as one."""

    def __init__(self, job: str, places: Iterable[PartsTier]) -> None:
        self.job, self.places = job, {place.files.where: place for place in places}
        rows = [(where, *row) for where, place in self.places.items() for row in _facts_in(place, job)]
        if not rows:
            raise ConfigError(f"no host has salvaged anything of job {job!r} into {', '.join(self.places)}")
        self.hosts, self.journals = {facts.host for _, _, facts in rows}, [facts.entries for *_, facts in rows]
        longest: list[Entry] = max(self.journals, key=len, default=[])
        for entries, (where, *_) in zip(self.journals, rows, strict=True):
            check_same_run(job, longest, entries, where)  # some hosts may have lost theirs
        steps, files = {step for _, step, _ in rows}, {where: place.files for where, place in self.places.items()}
        self.names = {(where, step): files[where].names(job, step) for where in files for step in steps}
        self.known: dict[tuple[int, str], KnownShard] = {}  # by rank and digest
        for data in {data for *_, facts in rows for data in facts.manifests}:
            one = KnownShard.of(data)
            summands = (summand_manifest(one.manifest, each.rank) for each in one.spec.summands)
            for each in (one, *map(KnownShard.of, filter(None, summands))):
                self.known[each.manifest.shard.rank, each.spec.digest] = each
        self.bad: set[tuple[str, str, int]] = set()  # where, shard's digest, chunk: it matches no digest

    def copies(self) -> Iterator[Copy]:
        """Yield what each place has of each shard."""
        for where, step in self.names:
            for each in self.known.values():
                chunks = range(each.spec.chunks_count if each.step == step else 0)
                missing = frozenset(index for index in chunks if not self._is_there(where, each, index))
                if each.step == step and (len(missing) < len(chunks) or not chunks):
                    yield Copy(each.manifest.shard, each.spec, where, missing)

    def _is_there(self, where: str, known: KnownShard, index: int) -> bool:
        name = slice_name(known.manifest.shard.rank, index // slice_chunks(known.spec), known.spec.digest)
        return name in self.names.get((where, known.step), ()) and (where, known.spec.digest, index) not in self.bad

    def chunk(self, known: KnownShard, index: int) -> bytearray | None:
        """Return a chunk that matches its digest, from any place; None if there is none."""
        for where, place in self.places.items():
            if self._is_there(where, known, index):
                if (data := sound_chunk(place, known, index)) is not None:
                    return data
                self.bad.add((where, known.spec.digest, index))
        return None

    def decoded(self, parity: Iterable[Copy], known: KnownShard, index: int) -> bytes | None:
        """Return a chunk that matches its digest, from a row of parity and all others in it; None if that fails."""
        rank, parity = known.manifest.shard.rank, list(parity)
        for copy in parity:
            ranks, owner = set_of(copy.shard, copy.spec), copy.shard.rank
            is_in = any((each.rank, each.digest) == (rank, known.spec.digest) for each in copy.spec.summands)
            row = ranks.row_of(owner, rank, index) if is_in else None
            parts = self._row_parts(copy, parity, rank, row) if row is not None else None
            if parts is not None:
                data = decode_row(parts, known.spec.chunk_nbytes(index))
                if chunk_digest(data) == known.manifest.chunks[index].digest:
                    return data
        return None

    def _row_parts(
        self, copy: Copy, parity: Iterable[Copy], rank: int, row: int
    ) -> list[tuple[bytes | bytearray, int]] | None:
        """Return what adds up to a rank's chunk in a row, each with its factor; None if too much lacks."""
        ranks, owner = set_of(copy.shard, copy.spec), copy.shard.rank
        found: dict[int, bytearray | None] = {}
        for other in (each for each in copy.spec.summands if each.rank != rank):
            known, chunk = self.known[other.rank, other.digest], ranks.chunk_in(owner, other.rank, row)
            if chunk is not None and chunk < known.spec.chunks_count:
                found[other.rank] = self.chunk(known, chunk)
        there = {other: data for other, data in found.items() if data is not None}
        gone = [other for other in found if other not in there]
        nexts = [
            each for each in parity if (each.shard.rank, set_of(each.shard, each.spec)) == (ranks.next(owner), ranks)
        ]
        if len(gone) > (ranks.spare > 1 and row % ranks.spare == 0 and bool(nexts)):
            return None
        first, second, factors = ranks.decoding(row, rank, gone[0] if gone else None, [*there])
        parts = [(self.chunk(self.known[owner, copy.spec.digest], row), first)]
        lacking = nexts[: len(gone)]
        parts += [(self.chunk(self.known[each.shard.rank, each.spec.digest], row + 1), second) for each in lacking]
        if any(data is None for data, _ in parts):
            return None
        return [(data or b"", factor) for data, factor in parts] + [(there[other], factors[other]) for other in there]


def sound_chunk(place: PartsTier, known: KnownShard, index: int) -> bytearray | None:
    """Return a chunk that lies there, None if it does not match its digest; a first slice's manifest must, too."""
    data = bytearray(known.spec.chunk_nbytes(index))
    with contextlib.suppress(IntegrityError):
        if index == 0:
            place.read_manifest(known.manifest.shard, known.spec)
        place.read_chunk_into(known.manifest.shard, known.spec, index, memoryview(data))
        return data if chunk_digest(data) == known.manifest.chunks[index].digest else None
    return None


def merge(
    job: str, places: Iterable[PartsTier], target: PartsTier, *, has_uncommitted: bool, progress: Progress
) -> dict[str, Any]:
    """Write the newest whole step that lies in these places into durable storage, its marker last; return its note.

    Raises:
        RecoveryError: none is whole; says which shards lack, and which hosts.
        ConfigError: nothing was salvaged there, or another run of the job is there, or in the storage.
    """
    found = Salvaged(job, places)
    target.files.probe()
    for entries in found.journals:
        _check_place(job, entries, target)
    while True:
        bad_count, now = len(found.bad), jobs_of(found.journals, found.copies()).get(job)
        plan = choose(now, has_uncommitted=has_uncommitted) if now is not None else None
        if now is None or plan is None or plan.step is None:
            why = plan.why if plan is not None else "the job was removed"
            absent = (
                name_some(now.committed_on(max(now.commits)) - found.hosts) if now is not None and now.commits else ""
            )
            of = f"; nothing is here of {absent}: salvage there, too, and name that place" if absent else ""
            raise RecoveryError(f"no step of job {job!r} can be rebuilt from {', '.join(found.places)}: {why}{of}")
        marker = DurableMarker(plan.step, len(plan.specs), plan.specs)
        parity = [copy for hosts in now.parity.get(plan.step, {}).values() for copy in hosts.values()]
        try:
            decoded_count = _write_step(found, marker, parity, target, progress)
            break
        except IntegrityError:
            if len(found.bad) == bad_count:  # else a chunk in these places went bad: plan again, without it
                raise
    target.write_marker(job, marker, now.lineage_of(marker.step.attempt))
    return {
        "job": job,
        "step": marker.step.step,
        "attempt": marker.step.attempt,
        "world_size": marker.world_size,
        "nbytes": sum(spec.nbytes for spec in marker.specs.values()),
        "is_committed": marker.step in now.commits,
        "decoded": decoded_count,
        "durable": target.files.where,
        "why": plan.why,
    }


def _write_step(
    found: Salvaged, marker: DurableMarker, parity: Sequence[Copy], target: PartsTier, progress: Progress
) -> int:
    """Write every slice of a step that is not there and sound; return how many chunks were decoded."""
    decoded_count, there = 0, target.files.names(found.job, marker.step)
    for rank, spec in marker.specs.items():
        known = found.known[rank, spec.digest]
        for number in range(slices_count(spec)):
            name, here, chunks = slice_name(rank, number, spec.digest), slice_range(spec, number), list[bytes]()
            progress(sum(map(spec.chunk_nbytes, here)))
            if name in there and all(sound_chunk(target, known, index) for index in here):
                continue
            for index in here:
                chunk = found.chunk(known, index)
                decoded_count += chunk is None
                data = chunk if chunk is not None else found.decoded(parity, known, index)
                if data is None:
                    raise IntegrityError(f"chunk {index} of the {known} matches no digest anywhere")
                chunks.append(bytes(data))
            target.files.remove(found.job, marker.step, [name] if name in there else [])
            target.write_slice(known.manifest.shard, spec, number, known.data, chunks, should_stop=lambda: False)
    return decoded_count
