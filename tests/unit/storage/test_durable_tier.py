"""The durable tier, on a directory and in every cloud alike: whole or not at all, marker last, first to go (R31)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from memstore.core.durable.paths import MARKER
from memstore.core.durable.slice_format import slices_count
from memstore.core.wire.orders import Lineage
from memstore.errors import ConfigError, DigestMismatch, IntegrityError, InternalError, PeerTimeout
from memstore.shell.durable import objects
from memstore.shell.durable.objects import ObjectFiles
from memstore.shell.durable.tier import PartsTier, files_from_url
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    chunks_of,
    lineage_of,
    manifest_of,
    markers_of,
    names_of,
    never,
    payload_of,
    read_payload,
    shard_of,
    spec_of,
    write_part,
    write_slice,
    write_step,
)
from memstore.testing.faults.object_servers import CLOUDS, ObjectServer
from recovery.inventory import DurableMarker, ShardId, StepId

NUMBERS = itertools.count()
pytestmark = pytest.mark.parametrize("object_server", ["directory", *CLOUDS], indirect=True)


@pytest.fixture
def url(object_server: ObjectServer | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place of either kind."""
    if object_server is None:
        (tmp_path / "durable").mkdir()
        return str(tmp_path / "durable")
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    objects._store.cache_clear()  # it keeps the environment of the test before
    return f"{object_server.url}/folder-{next(NUMBERS)}"


@pytest.fixture
def tier(url: str) -> PartsTier:
    return PartsTier(files_from_url(url))


def names(tier: PartsTier, step: int = 1) -> set[str]:
    """What lies in a step."""
    return tier.files.names(JOB, StepId(1, step))


def overwrite(tier: PartsTier, step: int, name: str, data: bytes) -> None:
    """Put other bytes in the place of a file, behind the tier's back."""
    if isinstance(tier.files, ObjectFiles):
        import obstore

        obstore.put(tier.files.store, f"{JOB}/1/{step}/{name}", data, use_multipart=False)
        tier.files._readers.clear()
    else:
        Path(tier.files.where, JOB, "1", str(step), name).write_bytes(data)


def stored(tier: PartsTier, step: int, name: str) -> bytes:
    """The bytes of a file."""
    with tier.files.opened(JOB, StepId(1, step), name) as reader:
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 40 * CHUNK + 1])
def test_step_round_trips(tier: PartsTier, nbytes: int) -> None:
    """What was written comes back bit for bit, for empty, short, exact and ragged payloads."""
    marker = write_step(tier, 10, nbytes=nbytes)
    assert markers_of(tier, JOB) == ([marker], [])
    for rank, spec in marker.specs.items():
        shard = shard_of(10, rank)
        assert tier.read_manifest(shard, spec) == manifest_of(shard)
        assert read_payload(tier, shard, spec) == payload_of(shard, nbytes)
    assert names(tier, 10) == {MARKER, *names_of(shard_of(10), nbytes), *names_of(shard_of(10, 1), nbytes)}
    assert slices_count(spec_of(shard_of(10), 40 * CHUNK + 1, 1)) == 14


def test_slices_may_come_in_any_order_from_any_process(tier: PartsTier, url: str) -> None:
    """Two writers that know nothing of one another write the slices of one shard backwards; the part is whole."""
    shard, nbytes = shard_of(1), 9 * CHUNK
    spec, other = spec_of(shard, nbytes, 1), PartsTier(files_from_url(url))
    for number in reversed(range(slices_count(spec))):
        assert write_slice((tier, other)[number % 2], shard, number, nbytes) is not None
    other.write_marker(JOB, DurableMarker(StepId(1, 1), 1, {0: spec}), lineage_of(1))
    assert read_payload(tier, shard, spec) == payload_of(shard, nbytes)


@pytest.mark.parametrize("left", [0, 40, -1])
def test_a_slice_that_a_crash_cut_short_is_written_again(tier: PartsTier, left: int) -> None:
    """Its name is taken by fewer bytes: the same step, written again, is whole and has its digests."""
    shard, nbytes = shard_of(1), 9 * CHUNK
    spec = spec_of(shard, nbytes, 1)
    write_part(tier, shard, nbytes)
    whole = {name: stored(tier, 1, name) for name in names_of(shard, nbytes)}
    cut = names_of(shard, nbytes)[0]
    overwrite(tier, 1, cut, whole[cut][:left])
    marker = DurableMarker(StepId(1, 1), 1, {0: spec})
    tier.write_marker(JOB, marker, lineage_of(1))
    assert tier.lacks(JOB, marker.step)

    write_part(tier, shard, nbytes)
    assert {name: stored(tier, 1, name) for name in whole} == whole
    assert tier.lacks(JOB, marker.step) == ""
    assert tier.read_manifest(shard, spec) == manifest_of(shard)
    assert read_payload(tier, shard, spec) == payload_of(shard, nbytes)


def test_markers_come_oldest_first_with_lineage(tier: PartsTier) -> None:
    """Attempts and steps are ordered as numbers, and each record carries its parent (R22)."""
    for attempt, step in ((2, 9), (10, 100), (2, 10)):
        write_part(tier, shard_of(step, 0, attempt))
        spec = spec_of(shard_of(step, 0, attempt), 3 * CHUNK + 7, 1)
        lineage = Lineage(attempt=attempt, parent_attempt=attempt - 1, parent_step=8, attempts=((1, 8.0),))
        tier.write_marker(JOB, DurableMarker(StepId(attempt, step), 1, {0: spec}), lineage)
    records, problems = tier.marker_records(JOB)
    assert [record.marker.step for record in records] == [StepId(2, 9), StepId(2, 10), StepId(10, 100)]
    assert records[-1].lineage == Lineage(attempt=10, parent_attempt=9, parent_step=8, attempts=((1, 8.0),))
    assert problems == []


def test_part_without_marker_is_invisible(tier: PartsTier) -> None:
    """A crash before the marker leaves a step that no get returns."""
    write_part(tier, shard_of(5))
    assert markers_of(tier, JOB) == ([], [])


def test_marker_is_refused_before_its_parts(tier: PartsTier) -> None:
    """The marker is last: with a part or one slice missing, or of other bytes, it is not written."""
    write_part(tier, shard_of(5, 0))
    write_slice(tier, shard_of(5, 1), 0)
    marker = DurableMarker(StepId(1, 5), 2, {r: spec_of(shard_of(5, r), 3 * CHUNK + 7, 2) for r in range(2)})
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"lacks 1 of 2 parts.*first ranks \[1\]"):
            tier.write_marker(JOB, marker, lineage_of(1))
        assert markers_of(tier, JOB) == ([], [])
        tier.write_slice(shard_of(5, 1), spec_of(shard_of(6), 1, 1), 0, b"m", [memoryview(b"x")], should_stop=never)
    write_slice(tier, shard_of(5, 1), 1)
    tier.write_marker(JOB, marker, lineage_of(1))
    assert markers_of(tier, JOB) == ([marker], [])


def test_same_slice_and_same_marker_again_are_fine_other_bytes_lie_beside(tier: PartsTier) -> None:
    """What a marker promises is never replaced: other bytes have another name, another marker is refused."""
    marker = write_step(tier, 5)
    write_part(tier, shard_of(5))
    tier.write_marker(JOB, marker, lineage_of(1))
    other = spec_of(shard_of(6), 1, 1)
    tier.write_slice(shard_of(5), other, 0, manifest_of(shard_of(6)), [memoryview(b"x")], should_stop=never)
    with pytest.raises(IntegrityError, match="remove the step first"):
        tier.write_marker(JOB, DurableMarker(StepId(1, 5), 1, {0: other}), lineage_of(1))
    assert markers_of(tier, JOB) == ([marker], [])
    assert read_payload(tier, shard_of(5), marker.specs[0]) == payload_of(shard_of(5), 3 * CHUNK + 7)


def test_stop_in_the_middle_leaves_nothing(tier: PartsTier) -> None:
    """An abandoned write says so, and neither the slice nor a temporary file is left (R31)."""
    for stop_at in range(1, 4):
        answers = iter([False] * (stop_at - 1) + [True] * 9)
        assert write_slice(tier, shard_of(1), 0, should_stop=lambda answers=answers: next(answers)) is None
        assert names(tier) == set()


def test_failing_source_leaves_nothing_and_its_error_passes(tier: PartsTier) -> None:
    """When the chunks cannot be read any more the caller's error comes out unchanged and no temporary file stays."""

    def expired() -> Iterator[memoryview]:
        yield memoryview(bytes(CHUNK))
        raise PeerTimeout("the pin expired")

    with pytest.raises(PeerTimeout, match="the pin expired"):
        tier.write_slice(shard_of(1), spec_of(shard_of(1), 4 * CHUNK, 1), 0, b"m", expired(), should_stop=never)
    assert names(tier) == set()


@pytest.mark.parametrize("sizes", [(CHUNK,), (CHUNK, 7), (7, CHUNK), (CHUNK, CHUNK, CHUNK), (CHUNK, 0), ()])
def test_uneven_chunks_are_our_bug(tier: PartsTier, sizes: tuple[int, ...]) -> None:
    """Chunks that could not be found again by their index are refused, not written."""
    spec = spec_of(shard_of(1), 4 * CHUNK, 1)
    with pytest.raises(InternalError, match="was given"):
        tier.write_slice(shard_of(1), spec, 0, b"m", [memoryview(bytes(s)) for s in sizes], should_stop=never)
    assert names(tier) == set()


def test_concurrent_writers_of_one_slice(tier: PartsTier) -> None:
    """Two writers of the same slice, in step chunk by chunk, both succeed and leave one whole slice."""
    shard, turn = shard_of(1), threading.Barrier(2, timeout=120)
    spec, results = spec_of(shard, 2 * CHUNK, 1), list[object]()

    def paced() -> Iterator[memoryview]:
        for chunk in chunks_of(payload_of(shard, 2 * CHUNK)):
            turn.wait()
            yield chunk

    def write() -> None:
        results.append(tier.write_slice(shard, spec, 0, manifest_of(shard), paced(), should_stop=never))

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(set(results)) == 1
    assert results[0] is not None
    assert names(tier) == set(names_of(shard, 2 * CHUNK))
    assert read_payload(tier, shard, spec) == payload_of(shard, 2 * CHUNK)


def test_a_removed_step_is_gone_and_the_others_are_not(tier: PartsTier) -> None:
    """Removing twice is fine; another step and another job stay."""
    write_step(tier, 1)
    kept = write_step(tier, 2)
    for _ in range(2):
        tier.remove_step(JOB, StepId(1, 1))
        assert markers_of(tier, JOB) == ([kept], [])
        assert names(tier, 1) == set()


def test_removal_of_what_is_gone_removes_the_rest(tier: PartsTier) -> None:
    """Two hosts may remove one step: names that the other has removed are in no one's way."""
    write_step(tier, 1)
    ours = sorted(names(tier))
    tier.files.remove(JOB, StepId(1, 1), ours[1:3])
    tier.files.remove(JOB, StepId(1, 1), ours)
    assert names(tier) == set()


def test_a_step_of_more_names_than_a_page_is_listed_and_removed(tier: PartsTier) -> None:
    """A listing of S3 and Google has 1000 names, a removal 1000 on S3 and 256 on Azure."""
    ours = {f"rank-{number}.0.{'a' * 32}" for number in range(1001)}
    with ThreadPoolExecutor(8) as pool:
        write = partial(tier.files.write, JOB, StepId(1, 1), pieces=[b"x"], should_stop=never, is_once=True)
        assert set(pool.map(write, ours)) == {"written"}
    assert names(tier) == ours
    tier.files.remove(JOB, StepId(1, 1), ours)
    assert names(tier) == set()


def test_sweep_removes_what_crashes_left(tier: PartsTier) -> None:
    """Unmarked steps go, unless a live write may own them; a damaged marker is left to a person."""
    marker = write_step(tier, 1)
    for step in (2, 3, 4):
        write_part(tier, shard_of(step))
    assert tier.sweep(JOB, {StepId(1, 3)}) == (StepId(1, 2),)
    assert (names(tier, 2), len(names(tier, 3)), len(names(tier, 4))) == (set(), 2, 2)
    overwrite(tier, 3, MARKER, b"torn")
    assert tier.sweep(JOB, ()) == (StepId(1, 4),)
    assert markers_of(tier, JOB)[0] == [marker]
    assert len(names(tier, 3)) == 3


def test_every_torn_marker_is_reported_and_skipped_and_may_be_written_again(tier: PartsTier) -> None:
    """No damaged marker is trusted; sound ones are still listed; the true marker may take the damaged one's place."""
    sound, torn = write_step(tier, 1), write_step(tier, 2)
    with tier.files.opened(JOB, StepId(1, 2), MARKER) as reader:
        whole = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(whole))
    damaged = [bytes(whole[:length]) for length in (1, 30, len(whole) - 1)]
    damaged += [bytes(whole[:at]) + bytes([whole[at] ^ 4]) + bytes(whole[at + 1 :]) for at in range(0, len(whole), 41)]
    for data in damaged:
        overwrite(tier, 2, MARKER, data)
        markers, problems = markers_of(tier, JOB)
        assert markers == [sound]
        assert len(problems) == 1
        assert "step 2" in problems[0]
    tier.write_marker(JOB, torn, lineage_of(1))
    assert markers_of(tier, JOB) == ([sound, torn], [])


def test_truncated_or_altered_slice_is_refused(tier: PartsTier) -> None:
    """A slice cut anywhere, or changed in its frame, is an IntegrityError for the manifest and for each chunk."""
    spec, [name, _] = write_step(tier, 1).specs[0], names_of(shard_of(1))
    with tier.files.opened(JOB, StepId(1, 1), name) as reader:
        whole = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(whole))
    cuts = [bytes(whole[:length]) for length in (1, 79, 90, 100, len(whole) - CHUNK - 1, len(whole) - 1)]
    flips = [bytes(whole[:at]) + bytes([whole[at] ^ 1]) + bytes(whole[at + 1 :]) for at in (0, 9, 12, 20, 30, 60, 88)]
    for data in (*cuts, *flips, bytes(whole) + b"x"):
        overwrite(tier, 1, name, data)
        with pytest.raises(IntegrityError, match="rank-0"):
            tier.read_manifest(shard_of(1), spec)
        with pytest.raises(IntegrityError):
            tier.read_chunk_into(shard_of(1), spec, 0, memoryview(bytearray(CHUNK)))
    with pytest.raises(IntegrityError, match=r"gone|No such file"):
        tier.read_chunk_into(shard_of(9), spec, 0, memoryview(bytearray(CHUNK)))


def test_an_altered_manifest_is_a_digest_mismatch_with_both_digests(tier: PartsTier) -> None:
    """The manifest is checked against the digest that the marker names (R14)."""
    spec, [name, _] = write_step(tier, 1).specs[0], names_of(shard_of(1))
    with tier.files.opened(JOB, StepId(1, 1), name) as reader:
        whole = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(whole))
    overwrite(tier, 1, name, bytes(whole).replace(b"manifest of", b"manifest 0f", 1))
    with pytest.raises(DigestMismatch) as caught:
        tier.read_manifest(shard_of(1), spec)
    assert vars(caught.value)["expected"] == spec.digest


@pytest.mark.parametrize(("index", "nbytes"), [(0, CHUNK - 1), (3, CHUNK), (4, 7), (-1, CHUNK)])
def test_chunk_of_another_size_or_place_is_refused(tier: PartsTier, index: int, nbytes: int) -> None:
    """A view that is not the chunk's size, or an index out of range, is never filled in part."""
    spec = write_step(tier, 1).specs[0]
    with pytest.raises(IntegrityError):
        tier.read_chunk_into(shard_of(1), spec, index, memoryview(bytearray(nbytes)))


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "../x", ".hidden", "a" * 65, "a\n", "a\0b", "ä"])
def test_job_names_cannot_leave_the_root(tier: PartsTier, job: str) -> None:
    """A name that is no plain folder name is a ConfigError in every call that takes one."""
    spec = spec_of(shard_of(1), 0, 1)
    calls: list[Callable[[], object]] = [
        lambda: tier.write_slice(ShardId(job, 1, 1, 0), spec, 0, b"m", [], should_stop=never),
        lambda: tier.read_manifest(ShardId(job, 1, 1, 0), spec),
        lambda: markers_of(tier, job),
        lambda: tier.remove_step(job, StepId(1, 1)),
        lambda: tier.sweep(job, ()),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="no folder name"):
            call()


@pytest.mark.parametrize("shard", [ShardId(JOB, -1, 1, 0), ShardId(JOB, 1, -1, 0), ShardId(JOB, 1, 1, -1)])
def test_negative_numbers_are_refused(tier: PartsTier, shard: ShardId) -> None:
    """Attempt, step and rank become file names only as whole numbers from 0."""
    with pytest.raises(ConfigError, match="whole number"):
        tier.write_slice(shard, spec_of(shard, 0, 1), 0, b"m", [], should_stop=never)


def test_probe_leaves_nothing(tier: PartsTier) -> None:
    """Probing succeeds as often as asked, and no step appears."""
    tier.files.probe()
    tier.files.probe()
    assert markers_of(tier, JOB) == ([], [])


def test_hosts_of_one_place_see_one_anothers_probes(url: str) -> None:
    """A file that is kept until the others have looked, and then removed by the same call."""
    one, other = files_from_url(url), files_from_url(url)
    one.probe("a", is_kept=True)
    other.probe("b", is_kept=True)
    assert one.probes() == other.probes() == {"a", "b"}
    one.probe("a")
    assert other.probes() == {"b"}
    other.probe("b")
    assert one.probes() == set()


def test_a_place_that_is_not_there_is_never_an_empty_history(url: str) -> None:
    """An unmounted share or a bucket that is gone is an error that says so, not a job that no process knows (R23)."""
    gone = url.replace("bucket", "no-such-bucket") if "://" in url else url + "/unmounted"
    tier = PartsTier(files_from_url(gone))
    for call in (lambda: markers_of(tier, JOB), lambda: tier.sweep(JOB, ())):
        with pytest.raises(ConfigError, match=r"create the bucket|mount or create it"):
            call()
    with pytest.raises(ConfigError):
        write_part(tier, shard_of(1))


def test_what_a_marked_step_lacks_is_found_in_the_storage(tier: PartsTier) -> None:
    """A missing marker, a missing slice: named. A whole step lacks nothing."""
    marker = write_step(tier, 5)
    assert tier.lacks(JOB, marker.step) == ""
    assert "marker" in tier.lacks(JOB, StepId(1, 6))
    tier.files.remove(JOB, marker.step, names_of(shard_of(5))[:1])
    assert tier.lacks(JOB, marker.step)
