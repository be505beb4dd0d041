"""The durable tier: parts cut into slices, the marker last, on files of a directory or objects of a store (R31).

Formats are in `memstore/core/durable/slice_format.py` and `markers.py`; when to write, who writes what and what
to keep is decided by `memstore/core/schedule.py` and `writes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from urllib.parse import unquote

import xxhash

from memstore.core.durable.increments import apply_patch, needed_names, part_names
from memstore.core.durable.markers import MARKER_LIMIT_BYTES, MarkerRecord, decode_marker, encode_marker
from memstore.core.durable.paths import MARKER, is_step_file, slice_name
from memstore.core.durable.slice_format import (
    MANIFEST_LIMIT_BYTES,
    SliceHeader,
    decode_header,
    header_nbytes,
    slice_chunks,
    slice_range,
    slice_tag,
    slices_count,
)
from memstore.core.durable.storage_ports import DurableFiles, DurableReader
from memstore.core.wire.orders import DurablePlace, Lineage
from memstore.errors import CapacityError, ConfigError, DigestMismatch, IntegrityError, InternalError
from memstore.shell.durable.codec import Codec, read_key
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.objects import SCHEMES, ObjectFiles
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, StepId

LOOK_THREADS = 16  # slices looked at at once: a request each, of an object store


class PartsTier:
    """Storage that outlives every host's memory, on `files`, which every host of the job sees alike.

    All calls block; none runs on a training thread. Errors are those of `DurableFiles`.
    """

    def __init__(
        self, files: DurableFiles, codec: Codec | None = None, read_under: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        """Read slices whose names carry the key `read_under`, by default the codec's, and those of these tags."""
        self.files, self.codec, self.tags = files, codec or Codec(), tags
        self.key = self.codec.key_name
        self.read_under = self.key if read_under is None else read_under

    def write_slice(
        self,
        shard: ShardId,
        spec: ShardSpec,
        number: int,
        manifest: bytes,
        chunks: Iterable[bytes | memoryview],
        *,
        should_stop: Callable[[], bool],
        origins: tuple[SliceRef | None, ...] = (),
    ) -> int | None:
        """Write one slice whole or not at all; writing it again is fine, and mends one whose frame is damaged.

        The chunks are copied first: their slots may be given away while slow storage takes its time (R7).

        Args:
            shard: Whose slice it is.
            spec: Says into which slices the shard is cut (`slice_format.slice_range`).
            number: Of the slice.
            manifest: Opaque; its xxh3-128 is the shard's digest (R14). Stored with slice 0.
            chunks: Those of the slice, in order; of one that an older slice has what it is patched with, or b"".
            should_stop: Asked between chunks; True abandons the write and leaves nothing behind.
            origins: Of every chunk the older slice that has it, or None; empty: the slice is whole.

        Returns:
            The bytes stored when the slice is durable, None when it was abandoned.
        """
        if len(manifest) > MANIFEST_LIMIT_BYTES:
            raise CapacityError(f"manifest of {len(manifest)} bytes, the limit is {MANIFEST_LIMIT_BYTES}")
        ref = SliceRef(_step_of(shard), spec.digest, slice_tag(origins))
        name = slice_name(shard.rank, number, spec.digest, self.key, ref.tag)
        head = manifest if number == 0 else b""
        pieces: list[bytes] = []
        for chunk in chunks:
            if should_stop():
                return None
            pieces.append(bytes(chunk))
        found, wanted = [len(piece) for piece in pieces], slice_range(spec, number)
        refs = origins or (None,) * len(wanted)
        sizes = [None if ref else spec.chunk_nbytes(index) for index, ref in zip(wanted, refs, strict=True)]
        if [nbytes if size else size for nbytes, size in zip_longest(found, sizes)] != sizes:
            raise InternalError(f"slice {number} of {shard} has chunks {wanted} and was given {found} bytes")
        stored = self.codec.seal(spec, number, head, pieces, origins if any(origins) else ())
        write = partial(self.files.write, shard.job, ref.step, name, stored, should_stop=should_stop)
        wrote = write(is_once=True)
        if wrote == "there" and not self._is_framed(shard, spec, number, ref):
            wrote = write(is_once=False)
        return None if wrote == "stopped" else sum(len(piece) for piece in stored)

    def _is_framed(self, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef) -> bool:
        """Say whether a slice that is there has a sound header and is as long as that says: a crash may cut files."""
        try:
            with self._opened(shard, spec, number, ref, self.key):
                return True
        except IntegrityError:
            return False

    def write_marker(self, job: str, marker: DurableMarker, lineage: Lineage) -> None:
        """Declare a step whole, after checking that every slice of every part is there (R31).

        IntegrityError: one is missing, or a sound marker of other bytes is there already.
        """
        record, path = encode_marker(job, marker, lineage), self.files.path(job, marker.step.attempt, marker.step.step)
        found = self.files.names(job, marker.step)
        missing = sorted(rank for rank in marker.specs if not found.issuperset(part_names(marker, rank)))
        for step, names in needed_names([marker]).items():
            if gone := names - self.files.names(job, step):
                raise IntegrityError(
                    f"{path} reads {len(gone)} slices of step {step.step} (attempt {step.attempt}) that are gone, "
                    f"first {min(gone)}: no marker was written; the next write of a step is whole"
                )
        if missing:
            raise IntegrityError(
                f"{path} as seen from this host lacks {len(missing)} of {marker.world_size} parts, or slices of them, "
                f"first ranks {missing[:10]}: no marker was written; every host must see the same storage there"
            )
        for is_once in (True, False):
            wrote = self.files.write(job, marker.step, MARKER, [record], should_stop=lambda: False, is_once=is_once)
            if wrote == "written" or self._has_equal_marker(job, marker, path):
                return

    def _has_equal_marker(self, job: str, marker: DurableMarker, path: str) -> bool:
        """Say whether this very marker is there.

        One that is damaged, names another key or other older slices, or is trusted otherwise may be replaced; one of
        other bytes may not.
        """
        try:
            there = self._read_marker(job, marker.step)
        except IntegrityError:
            return False
        if there is not None and there.marker.specs != marker.specs:
            raise IntegrityError(f"{path} is marked complete with other parts: remove the step first")
        return there is not None and there.marker == marker

    def marker_records(self, job: str) -> tuple[list[MarkerRecord], list[str]]:
        """Return the job's markers with their lineage, oldest first, and the faults of the others."""
        records: list[MarkerRecord] = []
        steps, problems = self.files.steps(job)
        for step in steps:
            try:
                record = self._read_marker(job, step)
            except IntegrityError as exc:
                problems.append(f"{job} attempt {step.attempt} step {step.step} is not used: {exc}")
                continue
            if record is not None:
                records.append(record)
        return records, problems

    def lacks(self, job: str, step: StepId) -> str:
        """Look at the marker, and at the frame and size of every slice that it names or reads, with any key."""
        try:
            record = self._read_marker(job, step)
            if record is None:
                return "durable storage does not have its marker"
            marker = record.marker
            with ThreadPoolExecutor(LOOK_THREADS, "memstore-look") as pool:  # its cost is waiting for answers
                list(pool.map(partial(self._look, job, marker), sorted(marker.specs)))
        except IntegrityError as exc:
            return str(exc)
        return ""

    def _look(self, job: str, marker: DurableMarker, rank: int) -> None:
        """Open all slices of a rank's part, and what they read; IntegrityError for one that is gone or not whole."""
        shard, spec = ShardId(job, marker.step.attempt, marker.step.step, rank), marker.specs[rank]
        for number in range(slices_count(spec)):
            tag = marker.use(rank, number).tag
            self.read_headers(shard, spec, number, SliceRef(marker.step, spec.digest, tag), marker.key)

    def read_headers(
        self, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef, key: str | None = None
    ) -> dict[SliceRef, SliceHeader]:
        """Return the headers of a slice and of all older ones that it reads.

        Raises:
            IntegrityError: One is gone, or not as it was written.
        """
        found: dict[SliceRef, SliceHeader] = {}
        todo = [ref]
        while todo:
            ref = todo.pop()
            if ref not in found:
                with self._opened(shard, spec, number, ref, key) as (_, header):
                    found[ref] = header
                todo += header.bases
        return found

    @contextmanager
    def _opened(
        self, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef, key: str | None = None
    ) -> Iterator[tuple[DurableReader, SliceHeader]]:
        """Open a slice of the shard's step, or an older one of the same rank and sizes that it reads."""
        step = _step_of(shard)
        name = slice_name(shard.rank, number, ref.digest, self.read_under if key is None else key, ref.tag)
        try:
            with self.files.opened(shard.job, ref.step, name) as reader:
                yield (
                    reader,
                    self._header(
                        reader,
                        shard._replace(attempt=ref.step.attempt, step=ref.step.step),
                        spec._replace(digest=ref.digest),
                        number,
                    ),
                )
        except IntegrityError as exc:
            if ref.step == step:
                raise
            raise IntegrityError(
                f"{self._path(shard)} reads step {ref.step.step} (attempt {ref.step.attempt}): {exc}; "
                "put that step's files back, or restore another step"
            ) from exc

    def read_manifest(self, shard: ShardId, spec: ShardSpec) -> bytes:
        """Return the shard's manifest, checked against its digest."""
        ref = self._ref(shard, spec, 0)
        with self._opened(shard, spec, 0, ref) as (reader, header):
            stored = bytearray(header.manifest_nbytes)
            reader.read_into(header.nbytes, memoryview(stored))
        with self._naming(self._place(shard, 0, ref)):
            manifest = self.codec.open_manifest(header, bytes(stored))
        actual = xxhash.xxh3_128_hexdigest(manifest)
        if actual != spec.digest:
            raise DigestMismatch(
                f"{self._place(shard, 0, ref)} has a manifest with digest {actual}, asked was {spec.digest}",
                shard=shard,
                expected=spec.digest,
                actual=actual,
            )
        return manifest

    def read_chunk_into(self, shard: ShardId, spec: ShardSpec, index: int, view: memoryview) -> None:
        """Fill `view` with chunk `index`; a view of another size than the chunk's is an IntegrityError."""
        if not 0 <= index < spec.chunks_count or view.nbytes != spec.chunk_nbytes(index):
            raise IntegrityError(
                f"{view.nbytes} bytes were asked of chunk {index} of {shard}, which has {spec.chunks_count} chunks "
                f"of {spec.chunk_bytes} bytes, {spec.nbytes} in all"
            )
        number = index // slice_chunks(spec)
        self._read_chunk(shard, spec, index, self._ref(shard, spec, number), view.cast("B"))

    def _read_chunk(self, shard: ShardId, spec: ShardSpec, index: int, ref: SliceRef, view: memoryview) -> None:
        """Fill `view` with a chunk of slice `ref`, or of the older one that has it, patched with what is here."""
        number = index // slice_chunks(spec)
        with self._opened(shard, spec, number, ref) as (reader, header):
            origin, (offset, nbytes, is_compressed) = header.origin(index), header.chunk_place(index)
            if origin is None and not (is_compressed or header.is_encrypted):
                reader.read_into(offset, view)
                return
            stored = bytearray(nbytes)
            reader.read_into(offset, memoryview(stored))
        if origin is not None:
            self._read_chunk(shard, spec, index, origin, view)
        with self._naming(self._place(shard, number, ref)):
            if origin is None:
                self.codec.open_chunk(header, index, bytes(stored), view)
            elif stored:
                apply_patch(view, self.codec.open_patch(header, index, bytes(stored)))

    def remove_step(self, job: str, step: StepId, *, only_unmarked: bool = False) -> None:
        """Remove the marker, make that durable, then what no newer step reads; a step that is not there is fine.

        Raises:
            IntegrityError: A newer step's marker is damaged: what it reads cannot be known, and stays.
        """
        if only_unmarked and self.files.has(job, step, MARKER):
            return
        self.files.remove(job, step, [MARKER])
        self._remove_parts(job, step, self._needed(job, step))

    def _remove_parts(self, job: str, step: StepId, needed: Mapping[StepId, Collection[str]]) -> None:
        """Remove what lies in a step, but for what newer ones read."""
        self.files.tidy(job, step)
        ours = {name for name in self.files.names(job, step) if is_step_file(name)}
        self.files.remove(job, step, ours.difference(needed.get(step, ())))

    def _needed(self, job: str, since: StepId) -> dict[StepId, set[str]]:
        """Return what steps newer than `since` read of older ones, as their markers say."""
        found = [self._read_marker(job, step) for step in self.files.steps(job)[0] if step > since]
        return needed_names(record.marker for record in found if record is not None)

    def sweep(self, job: str, keep: Collection[StepId]) -> tuple[StepId, ...]:
        """Remove temporary files and unmarked steps that no live write can own; return the steps removed.

        Steps in `keep`, and steps newer than all of `keep`, are not touched: they may be under way. With an empty
        `keep` every unmarked step goes, but for what newer ones read. A step whose marker is damaged stays for a person
        to see.
        """
        unmarked: list[StepId] = []
        newest = max(keep, default=None)
        for step in self.files.steps(job)[0]:
            if newest is not None and (step in keep or step > newest):
                continue
            self.files.tidy(job, step)
            if not self.files.has(job, step, MARKER):
                unmarked.append(step)
        needed = self._needed(job, unmarked[0]) if unmarked else {}
        for step in unmarked:
            self._remove_parts(job, step, needed)
        return tuple(step for step in unmarked if step not in needed)

    def _header(self, reader: DurableReader, shard: ShardId, spec: ShardSpec, number: int) -> SliceHeader:
        """Read and check the header of a slice that is open."""
        start = bytearray(min(reader.nbytes, header_nbytes(spec, number)))
        try:
            reader.read_into(0, memoryview(start))
            return decode_header(bytes(start), spec, number, file_nbytes=reader.nbytes)
        except IntegrityError as exc:
            raise IntegrityError(f"{self._path(shard)}/rank-{shard.rank}, slice {number}: {exc}") from exc

    def _read_marker(self, job: str, step: StepId) -> MarkerRecord | None:
        """Return the step's marker, None if it has none; IntegrityError for one that is damaged or of another step."""
        if not self.files.has(job, step, MARKER):
            return None
        path = f"{self.files.path(job, step.attempt, step.step)}/{MARKER}"
        with self.files.opened(job, step, MARKER) as reader:
            if reader.nbytes > MARKER_LIMIT_BYTES:
                raise IntegrityError(f"{path} has {reader.nbytes} bytes, the limit is {MARKER_LIMIT_BYTES}")
            data = bytearray(reader.nbytes)
            reader.read_into(0, memoryview(data))
        record = decode_marker(bytes(data))
        if (record.job, record.marker.step) != (job, step):
            found = record.marker.step
            raise IntegrityError(f"{path} belongs to {record.job} attempt {found.attempt} step {found.step}")
        return record

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Put the place in front of the codec's errors."""
        try:
            yield
        except (IntegrityError, ConfigError) as exc:
            raise type(exc)(f"{path}: {exc}") from exc

    def _path(self, shard: ShardId) -> str:
        return self.files.path(shard.job, shard.attempt, shard.step)

    def _place(self, shard: ShardId, number: int, ref: SliceRef) -> str:
        """Return where a slice lies, for messages."""
        name = slice_name(shard.rank, number, ref.digest, self.read_under, ref.tag)
        return f"{self.files.path(shard.job, ref.step.attempt, ref.step.step)}/{name}"

    def _ref(self, shard: ShardId, spec: ShardSpec, number: int) -> SliceRef:
        """Return a slice of the shard as this tier reads it."""
        return SliceRef(_step_of(shard), spec.digest, self.tags[number] if self.tags else "")


def _step_of(shard: ShardId) -> StepId:
    return StepId(shard.attempt, shard.step)


def open_tier(place: DurablePlace) -> PartsTier:
    """Return the tier of a job: `place` is what `core/durable/paths.py` made of its configuration.

    Raises:
        ConfigError: an unknown scheme, a relative path, a URL with credentials, a missing package, or a bad key file.
    """
    key = read_key(place.key_file) if place.key_file is not None else None
    return PartsTier(files_from_url(place.url), Codec(place.compression == "auto", key), place.key, place.tags)


def files_from_url(url: str) -> DurableFiles:
    """Return the files behind an absolute path, a file:// URL or an object store's URL.

    file:// is a directory and not an object store's imitation of one: a rename after an fsync outlives a power cut.
    """
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        return DirectoryFiles(url)
    if scheme in SCHEMES:
        return ObjectFiles(url)
    if scheme != "file":
        raise ConfigError(
            f"durable: {scheme[:20]!r} is no storage that memstore knows; give an absolute path, file:///path, "
            f"or a URL of {', '.join(name + '://' for name in SCHEMES)}; mount anything else and give its path"
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or "?" in path or "#" in path:
        raise ConfigError(f"durable={url!r}: write file:///absolute/path, without host, query or fragment")
    return DirectoryFiles(unquote(slash + path))
