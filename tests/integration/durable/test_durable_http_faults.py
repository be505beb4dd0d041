"""Object storage that fails, cuts, loses answers, is full or forbids: over HTTP, on each cloud's server (R25, R31)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.cli.lifecycle import check_writable
from memstore.core.durable.paths import MARKER
from memstore.errors import CapacityError, ConfigError, IntegrityError, MemstoreError, TransportError
from memstore.shell.durable import objects
from memstore.shell.durable.tier import PartsTier, files_from_url
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    lineage_of,
    markers_of,
    names_of,
    payload_of,
    read_payload,
    shard_of,
    spec_of,
    write_part,
    write_slice,
    write_step,
)
from memstore.testing.faults.object_servers import HttpFaults, ObjectServer
from recovery.inventory import DurableMarker, StepId

pytest.importorskip("obstore")
NUMBERS = itertools.count()
NBYTES = 3 * CHUNK + 7
DENIED = b"<Error><Code>AccessDenied</Code></Error>"
SECRET = b"<StringToSign>Signature</StringToSign>"


@pytest.fixture
def faults(http_faults: HttpFaults, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaults]:
    """The way to the server; obstore tries a request 4 times in all."""
    for name, value in http_faults.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_RETRIES", 3)
    monkeypatch.setattr(objects, "_BACKOFF_S", (0.01, 0.1))
    objects._store.cache_clear()
    yield http_faults
    http_faults.clear()
    objects._store.cache_clear()


@pytest.fixture
def tier(faults: HttpFaults) -> PartsTier:
    return PartsTier(files_from_url(f"{faults.url}/folder-{next(NUMBERS)}"))


def puts(faults: HttpFaults) -> list[str]:
    """The names that were put, in order."""
    return [path.rpartition("/")[2] for method, path, _, _ in faults.seen if method == "PUT"]


def test_every_byte_is_put_once_and_the_marker_last(tier: PartsTier, faults: HttpFaults) -> None:
    """Without faults each slice is one request, the marker the last one."""
    write_step(tier, 1, ranks=1)
    assert puts(faults) == [*names_of(shard_of(1)), MARKER]
    payload = sum(nbytes for method, path, _, nbytes in faults.seen if method == "PUT" and "rank-" in path)
    assert NBYTES < payload < NBYTES + 300


@pytest.mark.parametrize(
    ("kind", "status"), [("status", 500), ("status", 429), ("hang-up", 0), ("lose-reply", 0), ("reset", 0), ("wait", 0)]
)
def test_a_request_that_fails_is_tried_again(
    tier: PartsTier, faults: HttpFaults, kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, too many requests, connections that end or are reset half-way, no answer in time: written and read."""
    if kind == "wait":
        monkeypatch.setattr(objects, "_REQUEST_S", 1.0)
        objects._store.cache_clear()
        tier = PartsTier(files_from_url(tier.files.where))
    faults.add("PUT", names_of(shard_of(1))[0], kind=kind, status=status)
    faults.add("PUT", MARKER, kind=kind, status=status)
    faults.add("GET", "rank-0.1.", kind=kind, status=status)
    marker = write_step(tier, 1, ranks=1)
    assert read_payload(tier, shard_of(1), marker.specs[0]) == payload_of(shard_of(1), NBYTES)
    assert markers_of(tier, JOB) == ([marker], [])
    assert [rule.times for rule in faults.rules] == [0, 0, 0]


def test_a_server_that_goes_on_failing_is_no_evidence_about_the_bytes(tier: PartsTier, faults: HttpFaults) -> None:
    """TransportError for writes, reads and lists alike; when it is over everything is as it was (R25)."""
    marker = write_step(tier, 1, ranks=1)
    tier.files._readers.clear()  # type: ignore[attr-defined]
    for method in ("GET", "PUT", "HEAD"):
        faults.add(method, "", kind="status", status=503, times=100)
    view = memoryview(bytearray(CHUNK))
    for call in (
        lambda: tier.read_chunk_into(shard_of(1), marker.specs[0], 0, view),
        lambda: markers_of(tier, JOB),
        lambda: write_part(tier, shard_of(2)),
    ):
        with pytest.raises(TransportError):
            call()
    faults.clear()
    assert markers_of(tier, JOB) == ([marker], [])
    assert read_payload(tier, shard_of(1), marker.specs[0]) == payload_of(shard_of(1), NBYTES)


def test_a_body_that_ends_early_is_never_taken_for_the_whole(tier: PartsTier, faults: HttpFaults) -> None:
    """A truncated answer is asked for again, or is a TransportError: never short bytes, never evidence."""
    marker = write_step(tier, 1, ranks=1, nbytes=8 * CHUNK)  # chunks that lie behind what is read at the opening
    faults.add("GET", "rank-0.", kind="truncate", times=1)
    assert read_payload(tier, shard_of(1), marker.specs[0]) == payload_of(shard_of(1), 8 * CHUNK)
    faults.add("GET", "rank-0.", kind="truncate", times=1000)
    view = memoryview(bytearray(CHUNK))
    with pytest.raises(TransportError):
        tier.read_chunk_into(shard_of(1), marker.specs[0], 1, view)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (403, DENIED, ConfigError),
        (401, DENIED, ConfigError),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", ConfigError),
        (404, b"<Error>\n  <Code>ContainerNotFound</Code></Error>", ConfigError),
        (507, b"<Error><Code>InsufficientStorage</Code></Error>", CapacityError),
        (403, b"<Error><Code>QuotaExceeded</Code></Error>", CapacityError),
        (400, b"<Error><Code>EntityTooLarge</Code></Error>", TransportError),
    ],
)
def test_refusals_say_what_they_prove(
    tier: PartsTier, faults: HttpFaults, status: int, body: bytes, expected: type[MemstoreError]
) -> None:
    """Forbidden and missing are for a person to repair, full is full; place and code are named and no credential is."""
    faults.add("PUT", "rank-0.", kind="status", status=status, body=body + SECRET, times=10)
    faults.add("GET", "", kind="status", status=status, body=body + SECRET, times=10)
    for call in (lambda: write_part(tier, shard_of(1)), lambda: markers_of(tier, JOB)):
        with pytest.raises(expected) as caught:
            call()
        assert f"{faults.url}/" in str(caught.value)
        assert code_of(body) in str(caught.value)
        assert "Signature" not in str(caught.value)


def code_of(body: bytes) -> str:
    return body.partition(b"<Code>")[2].partition(b"<")[0].decode()


WRONG = {
    "gs": ("GOOGLE_BEARER_TOKEN", "of-another-day", "AuthenticationRequired"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=", "AuthorizationFailure"),
}


@pytest.mark.parametrize("object_server", WRONG, indirect=True)  # moto's server of S3 takes any
def test_wrong_credentials_are_for_a_person_to_correct(
    tier: PartsTier, faults: HttpFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the server itself refuses: every call names its answer and repeats no secret."""
    name, value, code = WRONG[faults.target.scheme]
    monkeypatch.setenv(name, value)
    objects._store.cache_clear()
    tier = PartsTier(files_from_url(tier.files.where))
    for call in (tier.files.probe, lambda: markers_of(tier, JOB), lambda: write_part(tier, shard_of(1))):
        with pytest.raises(ConfigError, match=rf"{code}.*credentials") as caught:
            call()
        assert value not in str(caught.value)


def test_a_conflict_is_not_taken_for_a_marker(tier: PartsTier, faults: HttpFaults) -> None:
    """A lock, or a container that is being deleted, answers as a name that is taken does: the marker is not written."""
    write_part(tier, shard_of(1))
    faults.add("PUT", MARKER, kind="status", status=409, body=b"<Error><Code>LeaseIdMissing</Code></Error>", times=10)
    with pytest.raises(TransportError, match="LeaseIdMissing"):
        tier.write_marker(JOB, DurableMarker(StepId(1, 1), 1, {0: spec_of(shard_of(1), NBYTES, 1)}), lineage_of(1))
    assert markers_of(tier, JOB) == ([], [])


def test_a_part_that_is_gone_is_evidence(tier: PartsTier) -> None:
    """An object that a process removed is an IntegrityError: the planner may turn to an older step (R25)."""
    import obstore

    marker = write_step(tier, 1, ranks=1)
    obstore.delete(tier.files.store, f"{JOB}/1/1/{names_of(shard_of(1))[1]}")  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError, match="gone"):
        read_payload(tier, shard_of(1), marker.specs[0])


def test_a_late_write_of_an_abandoned_order_replaces_nothing(tier: PartsTier, faults: HttpFaults) -> None:
    """A PUT that hangs on the way arrives after another host wrote the slice and the marker: the step is as it was."""
    held = faults.add("PUT", "rank-0.0.", kind="wait")
    late: list[object] = []
    writer = threading.Thread(target=lambda: late.append(write_slice(tier, shard_of(1), 0)))
    writer.start()
    while not faults.seen:  # the request is at the proxy, which holds it
        held.gate.wait(0.01)
    write_part(tier, shard_of(1))
    spec = spec_of(shard_of(1), NBYTES, 1)
    marker = DurableMarker(StepId(1, 1), 1, {0: spec})
    tier.write_marker(JOB, marker, lineage_of(1))
    held.gate.set()
    writer.join(60)
    assert late[0] is not None
    assert markers_of(tier, JOB) == ([marker], [])
    assert read_payload(tier, shard_of(1), spec) == payload_of(shard_of(1), NBYTES)


def test_a_server_that_is_gone_in_the_middle_is_a_transport_error(
    tmp_path: Path, faults: HttpFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two slices: the write ends within its retries and says that nothing is known."""
    with ObjectServer(faults.target.scheme, tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        tier = PartsTier(files_from_url(f"{server.url}/x"))
        assert write_slice(tier, shard_of(1), 0) is not None
        server.stop()
        with pytest.raises(TransportError):
            write_slice(tier, shard_of(1), 1)
        with pytest.raises(TransportError):
            markers_of(tier, JOB)


def test_up_refuses_a_bucket_it_cannot_write(faults: HttpFaults) -> None:
    """--durable-check takes URLs: the message names the place and the remedy, and a bucket that is there passes."""
    check_writable(f"{faults.url}/x")
    missing = f"{faults.target.scheme}://no-such-bucket/x"
    with pytest.raises(ConfigError, match=rf"{missing}.*create the bucket"):
        check_writable(missing)
    assert any("no-such-bucket" in path for _, path, _, _ in faults.seen)


@pytest.mark.parametrize("object_server", ["s3"], indirect=True)
def test_a_store_without_conditional_puts_is_written_without(tier: PartsTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the client is told of some servers of S3's interface: a step is written, and written again."""
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    objects._store.cache_clear()
    tier = PartsTier(files_from_url(tier.files.where))
    for _ in range(2):
        marker = write_step(tier, 1)
        assert markers_of(tier, JOB) == ([marker], [])


def test_an_endpoint_without_tls_is_refused_with_the_variable(
    faults: HttpFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """http:// is for a server of one's own, and asked for by a variable that the refusal names."""
    (name,) = [name for name in faults.environment() if name.endswith("_ALLOW_HTTP")]
    monkeypatch.delenv(name)
    objects._store.cache_clear()
    with pytest.raises(ConfigError, match=f"{name}=true"):
        markers_of(PartsTier(files_from_url(f"{faults.url}/x")), JOB)
    assert not faults.seen
