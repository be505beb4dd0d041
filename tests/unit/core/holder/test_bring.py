"""How a shard is staged, call by call: which hosts are asked, how often, and when it gives up (R25)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from holder_io import ScriptedIo
from msgspec import structs

from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.reads import bring, fetch, ready
from memstore.core.holder.reads.bring import BESIDE_S, LOOK_S, _await_other, _once, begin
from memstore.core.holder.state import Fetching, Limits, Ready
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring, DurablePlace, Run
from memstore.core.wire.peer_messages import ChunksLacking, FetchManifest
from memstore.core.wire.rank_messages import CheckInto, IntoChecked
from memstore.core.wire.replies import ShardReady
from memstore.core.wire.reports import Brought
from memstore.errors import FencedError, IntegrityError, MemstoreError, PeerTimeout, PeerUnreachable
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
SPEC = ShardSpec("d" * 32, 16, 8, 2, 1)
ORDER = Bring(
    read=7,
    job="job",
    shard=WireShard.of(SHARD),
    spec=WireSpec.of(SPEC),
    chunks=None,
    attempt=1,
    holders=("a", "me", "b", "c"),
    runs=(Run("peer", "a", 0, 2),),
    reader="n",
    use="get",
    durable=DurablePlace(url="/d", compression=None, key_file=None, bytes_per_s=None),
)
Answer = Callable[[str, list[int]], list[int] | MemstoreError]


@dataclass(eq=False)
class Link:
    """A connection of the rank's process."""

    nonce: str = "n"
    job: str = "job"
    rank: int = 0


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder that fetches; `answer` says which chunks of those asked for a source does not bring."""

    answer: Answer = lambda host, chunks: []
    asked: list[tuple[str, list[int]]] = field(default_factory=list)
    lacking: list[int] = field(default_factory=list)  # at a peer that digests its own bytes again
    holders: tuple[str, ...] = ORDER.holders
    manifests: list[str] = field(default_factory=list)  # sources that were asked for it; none has it now
    replica: IncomingReplica = field(default_factory=lambda: IncomingReplica(SHARD, [b"0", b"1"], [None, None], 1))
    is_given_up: bool = False  # what is brought, by a fence or with its step

    index = property(lambda self: self)
    lock = contextlib.nullcontext()

    @property
    def incoming(self) -> dict[str, IncomingReplica]:
        """Return what is open in the store."""
        return {} if self.is_given_up else {"stage": self.replica}

    def ensure_free(self, count: int) -> None:
        """There is room."""

    async def read_durable_manifest(self, *given: Any) -> bytes:
        self.manifests.append(fetch.DURABLE)
        raise PeerUnreachable("reset")

    async def call_peer(self, peer: Any, request: Any, **limits: Any) -> Any:
        if not isinstance(request, FetchManifest):
            return ChunksLacking(chunks=tuple(self.lacking))
        self.manifests.append(peer.host)
        raise PeerUnreachable("reset")

    async def receive_chunks(
        self, peer: Any, replica: IncomingReplica, digest: str, chunks: Sequence[int], others: Any = ()
    ) -> list[int]:
        return self._brought(peer.host, list(chunks))

    async def receive_durable(
        self, place: Any, replica: IncomingReplica, spec: ShardSpec, chunks: Sequence[int]
    ) -> list[int]:
        return self._brought(fetch.DURABLE, list(chunks))

    def abort_incoming(self, name: str, shard: ShardId, *, only: IncomingReplica) -> None:
        """What was brought is given back."""

    def _brought(self, host: str, chunks: list[int]) -> list[int]:
        self.asked.append((host, chunks))
        bad = self.answer(host, chunks)
        if isinstance(bad, MemstoreError):
            raise bad
        for index in set(chunks) - set(bad):
            self.replica.slots[index] = index
        return bad

    def fetch(self, *runs: Run) -> dict[str, list[int]]:
        """Fetch both chunks, planned from peer a; b and c have the shard as well."""
        order = structs.replace(ORDER, runs=runs or ORDER.runs, holders=self.holders)
        begin(self.state, order)
        until_s = fetch.deadline_s(self.state)
        return self.play(fetch.chunks(self, self.state, order, self.replica, until_s))


def test_all_that_is_planned_is_asked_of_its_source_at_once() -> None:
    """One question for each source, of the chunks that are not here yet."""
    host = Host()
    host.replica.slots[0] = 5
    assert host.fetch(Run("peer", "a", 0, 1), Run("peer", "b", 1, 1), Run("local", "me", 0, 1)) == {}
    assert host.asked == [("b", [1])]


def test_the_planned_source_is_asked_three_times_before_the_others() -> None:
    """Then the other holders in turn, never this host itself."""
    host = Host(lambda source, chunks: [] if source == "c" else PeerUnreachable("reset"))
    assert host.fetch() == {}
    assert [source for source, _ in host.asked] == ["a", "a", "a", "b", "c"]


def test_other_copies_are_asked_before_a_silent_source_is_asked_again() -> None:
    """Its silence has cost half a minute; the next fetch does not begin with it either, until it has had time."""
    host = Host(lambda source, chunks: [] if source == "c" else PeerTimeout("no answer for 30 s"))
    assert host.fetch() == {}
    host.replica.slots[:] = [None, None]
    assert host.fetch() == {}
    assert [source for source, _ in host.asked] == ["a", "b", "c", "c"]
    host.now += fetch.SILENT_S
    host.replica.slots[:] = [None, None]
    host.answer = lambda source, chunks: []
    assert host.fetch() == {}
    assert host.asked[-1][0] == "a"


def test_a_source_that_answers_again_is_no_silent_one_any_more() -> None:
    """It is asked first by the next fetch, at once."""
    answers: Iterator[list[int] | MemstoreError] = iter([PeerTimeout("no answer"), PeerTimeout("no answer"), [], []])
    host = Host(lambda source, chunks: next(answers))
    host.holders = ("a", "me", "b")
    host.state.reads.unanswered_s["c"] = 0.0
    assert host.fetch() == {}
    assert [source for source, _ in host.asked] == ["a", "b", "a"]
    host.replica.slots[:] = [None, None]
    assert host.fetch() == {}
    assert host.asked[-1][0] == "a"
    assert host.state.reads.unanswered_s == {"b": 0.2, "c": 0.0}


def test_a_silent_source_without_another_copy_is_asked_again() -> None:
    """Nothing else can bring the chunks."""
    answers: Iterator[list[int] | MemstoreError] = iter([PeerTimeout("no answer"), PeerTimeout("no answer"), []])
    host = Host(lambda source, chunks: next(answers), holders=("a", "me"))
    assert host.fetch() == {}
    assert [source for source, _ in host.asked] == ["a", "a", "a"]


def test_a_manifest_is_asked_last_of_a_source_that_was_silent() -> None:
    """So its silence is paid for once, not once for the manifest and once for each shard's chunks."""
    host = Host(lambda source, chunks: [] if source == "b" else PeerTimeout("no answer for 30 s"))
    assert host.fetch() == {}
    begin(host.state, ORDER)
    with pytest.raises(PeerUnreachable):
        host.play(fetch.brought_manifest(host, host.state, ORDER, 0.0))
    assert host.manifests == ["b", "c", fetch.DURABLE, "a"]


def test_what_the_source_lacks_on_its_own_word_is_evidence_and_not_asked_again() -> None:
    """What arrived damaged and lies there undamaged is asked for again (R25)."""
    answers = iter([[0, 1], []])
    host = Host(lambda source, chunks: next(answers), lacking=[0])
    assert host.fetch() == {"a": [0]}
    assert host.asked == [("a", [0, 1]), ("a", [1])]


def test_what_another_holder_lacks_is_no_evidence() -> None:
    """It was asked on the chance; the plan did not count on it."""
    host = Host(lambda source, chunks: PeerUnreachable("reset") if source == "a" else IntegrityError("not here"))
    with pytest.raises(PeerUnreachable):
        host.fetch()


def test_durable_storage_is_asked_alone_and_its_failure_is_no_evidence() -> None:
    """No peer stands in for it: the plan chose it because no peer has the chunks."""
    host = Host(lambda source, chunks: PeerUnreachable("storage hangs"))
    with pytest.raises(PeerUnreachable, match=r"^durable: storage hangs$"):
        host.fetch(Run("durable", None, 0, 2))
    assert {source for source, _ in host.asked} == {fetch.DURABLE}
    assert host.now >= fetch.RETRY_LIMIT_S


def test_a_fetch_fails_no_sooner_than_a_dead_source_is_known_dead() -> None:
    """Twice `dead_after_s`, if that is longer than 10 s."""
    host = Host(lambda source, chunks: PeerUnreachable("reset"))
    host.state.limits = Limits(5.0, 15.0)
    with pytest.raises(PeerUnreachable):
        host.fetch()
    assert host.now == pytest.approx(30.0, abs=1.0)


def test_a_newer_round_of_the_same_rank_makes_an_older_one_give_up() -> None:
    """Its result is not awaited any more, and its threads and slots are needed."""
    host = Host(lambda source, chunks: PeerUnreachable("reset"))
    host.meanwhile = lambda: begin(host.state, structs.replace(ORDER, read=8))
    with pytest.raises(PeerUnreachable):
        host.fetch()
    assert len(host.asked) == 2


def test_what_was_given_up_meanwhile_is_not_asked_for_again() -> None:
    """A fence or the end of the step aborts it: every chunk that still came would be dropped (R21)."""
    host = Host(lambda source, chunks: list(chunks))
    host.meanwhile = lambda: setattr(host, "is_given_up", True)
    with pytest.raises(FencedError, match="was given up"):
        host.fetch()
    assert len(host.asked) == 1


def arrivals(replica: IncomingReplica, every: int) -> Iterator[None]:
    """Bring a chunk at every so manyth look."""
    while True:
        for _ in range(every - 1):
            yield
        if replica.missing:
            replica.slots[replica.missing[0]] = 9
        yield


def test_a_read_beside_another_waits_as_long_as_chunks_come() -> None:
    """It takes the place of one for which nothing came for 10 s."""
    host, other = Host(), Fetching()
    other.replica = host.replica
    looks = arrivals(host.replica, 15)  # 7.5 s
    host.meanwhile = lambda: next(looks)
    assert host.play(_await_other(host, other)) is False
    assert host.now == pytest.approx(2 * 7.5 + BESIDE_S, abs=2 * LOOK_S)


def test_a_read_beside_another_goes_on_once_that_is_over() -> None:
    """It finds here what the other has brought."""
    host, other = Host(), Fetching(is_over=True)
    assert host.play(_await_other(host, other)) is True
    assert host.now == 0.0


def test_reads_that_come_later_wait_for_the_one_that_follows_a_failed_one() -> None:
    """The first was fenced while a second waited for it: a third is not to fetch the same shard beside that one."""
    host, failing = Host(), Fetching()
    fetching, key = host.state.reads.fetching, (SHARD, SPEC.digest)
    fetching[key] = failing
    is_known: list[bool] = []

    def fail() -> None:
        failing.is_over = True
        fetching.pop(key, None)

    async def fetch_all(_io: object, _state: object, _order: Bring, mine: Fetching) -> fetch.Chunks:
        is_known.append(fetching.get(key) is mine)
        return {}

    host.meanwhile = fail
    assert host.play(_once(host, host.state, ORDER, fetch_all)) == {}
    assert (is_known, fetching) == ([True], {})


@pytest.mark.parametrize("refusal", [None, ("ManifestMismatch", "another shape")])
def test_what_is_brought_is_reported_once_its_rank_has_compared_into(refusal: tuple[str, str] | None) -> None:
    """Neither an answer for an older get nor another process's answer is the rank's word (R26)."""
    host, link, other = Host(), cast(Any, Link()), cast(Any, Link("m"))
    begin(host.state, ORDER)
    host.state.reads.ready[7] = Ready(ORDER, host.replica, b"manifest", {})
    assert host.state.reads.check_of(link) == CheckInto(read=7, manifest=b"manifest")
    bring.checked(host.state, link, IntoChecked(read=6, refusal=None))
    bring.checked(host.state, other, IntoChecked(read=7, refusal=None))
    assert not host.reports
    for _ in range(2):  # it was asked again on a newer link
        bring.checked(host.state, link, IntoChecked(read=7, refusal=refusal))
    assert host.reports == [Brought(read=7, problem=None, bad={}, refusal=refusal)]


def test_a_newer_get_takes_the_place_of_an_older_one_that_waits_for_its_rank() -> None:
    """The rank's late answer says nothing of what is brought now."""
    host, link = Host(), cast(Any, Link())
    begin(host.state, ORDER)
    host.state.reads.ready[7] = Ready(ORDER, host.replica, b"", {})
    begin(host.state, structs.replace(ORDER, read=8))
    bring.checked(host.state, link, IntoChecked(read=7, refusal=None))
    assert (host.reports, host.state.reads.ready) == ([], {})


# -- ready --------------------------------------------------------------------------------------------
# Which pin a reader's `Unpin` ends, and what becomes of pins whose link has ended (R7).


REPLICA = IncomingReplica(SHARD, [b"0", b"1"], [4, 5], 1)


@dataclass(eq=False)
class ReadyLink:
    """A connection of one rank's process."""

    nonce: str = "n"
    job: str = "job"
    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    pins: dict[int, Callable[[], None]] = field(default_factory=dict)


@dataclass(eq=False)
class ReadyHost(ScriptedIo):
    """A holder that has brought one shard for several readers."""

    held: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def abort_incoming(self, name: str, shard: ShardId, *, only: IncomingReplica) -> None:
        self.held.remove(name)

    index = property(lambda self: self)
    lock = contextlib.nullcontext()

    def find_incoming(self, name: str, shard: ShardId) -> IncomingReplica | None:
        return REPLICA if name in self.held else None

    def connect(self) -> ReadyLink:
        """Let the rank's process connect, on a link that takes the place of an older one."""
        link: Any = ReadyLink()
        self.state.ranks.links["n"] = link
        return link  # type: ignore[no-any-return]

    def offer_slots(self, link: Any) -> int:
        """Bring the shard for a reader, and pin it."""
        read = next(self.numbers)
        order = Bring(
            read=read,
            job="job",
            shard=WireShard.of(SHARD),
            spec=WireSpec.of(ShardSpec("d" * 32, 16, 8, 2, 1)),
            chunks=None,
            attempt=1,
            holders=(),
            runs=(),
            durable=None,
            reader="n",
            use="read",
        )
        self.held.add(ready.name_of(read))
        ready.keep(self.state, Ready(order, REPLICA, b"manifest", {}))
        reply = ShardReady(step=2, attempt=1, verdict="local", why="", report=None, read=read)
        placed = self.play(ready.place(self, self.state, link, reply))
        assert placed.slots == (4, 5)
        return placed.pin


def test_a_late_unpin_of_an_older_link_frees_no_other_readers_pin() -> None:
    """The process came back on another link, on which another of its readers has a pin by then."""
    host = ReadyHost()
    old: Any = host.connect()
    late = host.offer_slots(old)
    ranks.end(host.state, old)
    new: Any = host.connect()
    pin = host.offer_slots(new)
    ready.give_back(new, late)
    assert len(host.held) == 1
    ready.give_back(new, pin)
    assert not host.held


def test_a_read_whose_link_has_just_ended_leaves_no_pin() -> None:
    """It would last until its deadline, and keep the slots of its step from puts."""
    host = ReadyHost()
    old = host.connect()
    host.connect()
    host.offer_slots(old)
    assert not host.held
