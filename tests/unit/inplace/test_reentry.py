"""The loop around a training function: what a loss frees, what is kept, and what an exception means."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from memstore.core.wire.calls import InPlace, RankLoss
from memstore.errors import GatherTimeout
from memstore.inplace import generation, membership, reentrant, reentry, watcher
from memstore.inplace.gloo_sockets import GlooSockets
from memstore.inplace.meeting import Meeting, MeetingPlace, MeetingServer, connect
from memstore.inplace.membership import Leaving, in_place_of, innermost_module, may_be_loss, met_text
from memstore.inplace.reentry import join_meeting
from memstore.shell.rank.launch import detect_launch
from memstore.testing.clusters.processes import wait_for

WAIT_S = 30.0
RECOVERIES, TENSORS, TENSOR_BYTES = 20, 16, 2 << 20


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(2)
    yield made
    join_meeting(None)
    made.close()


def place(server: MeetingServer, rank: int, world_size: int, *, meet_s: float = WAIT_S) -> MeetingPlace:
    return MeetingPlace(
        address="127.0.0.1",
        port=server.port,
        run="run",
        rank=rank,
        life=server.register(rank),
        first=0,
        world_size=world_size,
        launcher="launcher",
        backend="gloo",
        collective_timeout_s=600.0,
        meet_s=meet_s,
    )


@pytest.fixture
def is_aborted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Whether the communicators were aborted, of groups that pass for NCCL's until then."""
    made = threading.Event()
    monkeypatch.setattr(watcher, "has_nccl", lambda: not made.is_set())
    monkeypatch.setattr(watcher, "make_communicator", lambda gpu: None)
    monkeypatch.setattr(watcher, "abort", made.set)
    return made


def test_outside_of_a_group_a_reentrant_function_is_the_function_itself() -> None:
    """So a script runs as before where nothing replaces ranks."""

    @reentrant
    def train(first: int, *, second: int) -> tuple[int, int, object]:
        return first, second, generation()

    assert train(1, second=2) == (1, 2, None)
    assert reentrant(train) is train


def test_the_function_runs_in_a_process_group_and_a_launch_of_its_generation(server: MeetingServer) -> None:
    """connect() takes rank, size and key from it; afterwards nothing of it is left in the process."""
    make_group = c10d._new_process_group_helper
    join_meeting(place(server, 0, 1))
    server.begin(0)

    @reentrant
    def train() -> tuple[int, str | None, bool]:
        now = generation()
        assert now is not None
        dist.all_reduce(torch.ones(1))
        launch = detect_launch(env={})
        assert (launch.rank, launch.world_size, launch.launcher) == (0, 1, "launcher")
        return now.number, launch.key, launch.in_place is None

    assert train() == (0, "in-place:run:0", True)
    assert generation() is None
    assert not dist.is_initialized()
    assert c10d._new_process_group_helper is make_group
    assert not [thread for thread in threading.enumerate() if thread.name == "memstore-generation"]


def test_an_exception_of_the_functions_own_code_is_raised_without_a_question(
    server: MeetingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is lost by it, so there is no verdict to wait for."""

    def asked(self: Meeting, number: int) -> bool:
        raise AssertionError("whether a rank is lost was asked for")

    join_meeting(place(server, 0, 1))
    monkeypatch.setattr(reentry._Reentry, "_is_over", asked)
    server.begin(0)

    @reentrant
    def train() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train()
    assert not dist.is_initialized()


def test_a_rank_that_is_lost_while_the_group_is_made_frees_the_others(server: MeetingServer) -> None:
    """They wait for its address, by torch for as long as a collective may take; a loss cuts that short."""
    join_meeting(place(server, 0, 2, meet_s=5.0))
    other = Meeting(place(server, 1, 2))
    server.begin(0)
    with ThreadPoolExecutor(1) as threads:
        survivor = threads.submit(reentrant(lambda: None))
        assert other.meet(-1) == 0  # and dies
        wait_for(lambda: generation() is not None, "the survivor in generation 0")
        server.mark_broken()
        server.begin(1)
        wait_for(lambda: other.board.count("here/1") == 1, "the survivor in the next generation")
        with pytest.raises(GatherTimeout, match="1 of 2 ranks came to generation 1"):
            survivor.result(WAIT_S)
    assert c10d._world.group_count == 0, "the next group would have another name here than on a replacement"


def test_a_wait_for_a_lost_ranks_address_ends_when_the_store_is_shut(server: MeetingServer) -> None:
    """So does a wait in new_group() for a peer that is lost; the connection of the meeting itself stays."""
    here = place(server, 0, 2)
    meeting, sockets = Meeting(here), GlooSockets()
    sockets.record()
    store = connect(here)
    sockets.take_store(here.port)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(store.wait, ["address"], timedelta(seconds=2 * WAIT_S))
        while not waits.done():  # the wait may begin after a first shut
            sockets.shut_store()
        with pytest.raises(dist.DistError):
            waits.result()
    sockets.end()
    assert meeting.board.count("there", 1) == 1


def test_an_exception_after_an_abort_is_a_loss(server: MeetingServer, is_aborted: threading.Event) -> None:
    """An aborted collective leaves half a result on the GPU, at which the user's own check may raise."""
    join_meeting(place(server, 0, 1))
    server.begin(0)

    @reentrant
    def train() -> int:
        now = generation()
        assert now is not None
        if now.number == 0:
            server.mark_broken()
            server.begin(1)
            assert is_aborted.wait(WAIT_S)
            raise ValueError("the loss is not finite")
        return now.number

    assert train() == 1


def test_nothing_is_aborted_before_the_other_ranks_have_closed_their_stores(
    server: MeetingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is lost; rank 2's collective could end with half a result once rank 0 aborts, and rank 2 put that."""
    second_has_closed, closed_at_abort = threading.Event(), list[bool]()
    monkeypatch.setattr(watcher, "abort", lambda: closed_at_abort.append(second_has_closed.is_set()))
    monkeypatch.setattr(membership, "QUIET_S", WAIT_S)
    zero, two = Meeting(place(server, 0, 3)), Meeting(place(server, 2, 3))
    aborting = threading.Thread(target=reentry._abort, args=(zero, 5))
    aborting.start()
    wait_for(lambda: zero.board.count("closed/5") == 1, "rank 0 to close its store", WAIT_S)
    second_has_closed.set()
    two.wait_until_closed(5)
    aborting.join(WAIT_S)
    assert closed_at_abort == [True]


def test_an_exception_of_its_own_code_aborts_nothing(server: MeetingServer, is_aborted: threading.Event) -> None:
    """No rank is lost, so the others stay in their collectives, which would end with half a result."""
    join_meeting(place(server, 0, 1))
    server.begin(0)

    @reentrant
    def train() -> None:
        raise ValueError("no such column")

    try:
        with pytest.raises(ValueError, match="no such column"):
            train()
    finally:
        dist.destroy_process_group()  # the process would end
    assert not is_aborted.is_set()
    assert Meeting(place(server, 0, 1)).board.count("closed/0") == 0


def test_an_abort_does_not_need_the_meeting(
    server: MeetingServer, is_aborted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be gone, or this process may have no descriptor left for a connection to it."""
    meeting = Meeting(place(server, 0, 3))
    monkeypatch.setattr(meeting, "again", lambda: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    reentry._abort(meeting, 0)
    assert is_aborted.is_set()


def test_a_group_that_is_made_beside_the_abort_does_not_keep_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread is in new_group() while another thread aborts all groups: the next generation makes it."""
    real = c10d._register_process_group
    kept = []  # groups, as a mesh at module level keeps them

    def aborted_first(name: str, group: object) -> None:
        c10d._abort_process_group()
        real(name, group)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_register_process_group", aborted_first)
        kept.append(dist.new_group([0]))
    reentry._forget_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept.append(dist.new_group([0]))
    assert list(c10d._world.pg_names.values()) == ["0", "1"]
    dist.destroy_process_group()


def test_what_a_function_kept_is_there_when_it_is_entered_again(server: MeetingServer) -> None:
    """A collective fails, a loss is reported, and the same process goes on in the next generation."""
    join_meeting(place(server, 0, 1))
    server.begin(0)
    seen: list[tuple[int, bool, object]] = []
    entered: list[InPlace | None] = []

    @reentrant
    def train() -> str:
        now = generation()
        assert now is not None
        seen.append((now.number, now.is_first_here, now.kept.get("compiled")))
        now.kept["compiled"] = "code"
        entered.append(detect_launch(env={}).in_place)
        if now.number == 0:
            server.mark_broken()
            server.begin(1)
            dist.broadcast(torch.ones(1), src=7)  # torch raises: there is no rank 7
        return "done"

    assert train() == "done"
    assert seen == [(0, True, None), (1, False, "code")]
    first, second = entered
    assert first is None
    assert second is not None
    assert (second.generation, second.losses) == (1, ())
    assert None not in (second.detect_s, second.abort_s, second.replace_s)


def test_a_function_is_entered_again_as_it_was_the_first_time(server: MeetingServer) -> None:
    """It had switched gradients off for an evaluation, which the loss broke off, and had drawn random numbers."""
    join_meeting(place(server, 0, 1))
    server.begin(0)
    seen: list[tuple[bool, float]] = []

    @reentrant
    def train() -> None:
        seen.append((torch.is_grad_enabled(), torch.rand(()).item()))
        if len(seen) == 1:
            torch.set_grad_enabled(False)
            server.mark_broken()
            server.begin(1)
            dist.broadcast(torch.ones(1), src=7)  # torch raises: there is no rank 7

    train()
    assert seen[0] == seen[1]
    assert seen[0][0]


def test_memory_does_not_grow_with_recoveries(server: MeetingServer) -> None:
    """What a generation held is given back to the system, though what outlives it lies in between."""
    join_meeting(place(server, 0, 1))
    server.begin(0)
    entered_with: list[int] = []

    @reentrant
    def train() -> None:
        now = generation()
        assert now is not None
        for thread in threading.enumerate():
            if thread.name == "memstore-collect":
                thread.join()
        entered_with.append(anonymous_bytes())
        held = []
        for _ in range(TENSORS):
            held.append(torch.ones(TENSOR_BYTES // 4))
            now.kept.setdefault("small", []).append(bytearray(1000))
        if now.number < RECOVERIES:
            server.mark_broken()
            server.begin(now.number + 1)
            dist.broadcast(held[0], src=7)  # torch raises: there is no rank 7

    train()
    assert max(entered_with[1:]) - entered_with[0] < TENSORS * TENSOR_BYTES // 2


def anonymous_bytes() -> int:
    """Return how much memory of this process is in no file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


# -- test verdict -------------------------------------------------------------------------------------
# Which exceptions may come of a lost peer.


def error_of(code: str, module: str) -> BaseException:
    """Return what a piece of code raises that runs as this module, called from here."""
    try:
        exec(code, {"__name__": module, "torch": torch, "json": json})
    except BaseException as error:
        return error
    raise AssertionError(f"{code!r} raised nothing")


@pytest.mark.parametrize(
    ("code", "module", "is_asked"),
    [
        ("raise RuntimeError('Connection closed by peer')", "torch.distributed.distributed_c10d", True),
        ("raise RuntimeError('attempt 3 is over')", "memstore.client.puts", True),
        ("raise RuntimeError('reset')", "ray.train.v2._internal.execution.checkpoint.sync_actor", True),
        ("raise RuntimeError('Connection closed by peer')", "train", False),
        ("raise RuntimeError('mine')", "torchvision.models", False),
        ("json.loads('{')", "torch.distributed", False),
        ("torch.nn.functional.linear(torch.zeros(2), torch.zeros(3, 3))", "train", True),
        ("int('x')", "train", False),
        ("raise KeyboardInterrupt", "torch.distributed", False),
        ("raise SystemExit(1)", "torch.distributed", False),
    ],
)
def test_the_code_that_raised_says_whether_a_loss_is_asked_for(code: str, module: str, is_asked: bool) -> None:
    """The text says nothing: users raise RuntimeError too, and what they raise is theirs at once."""
    assert may_be_loss(error_of(code, module)) == is_asked


def test_an_exception_that_was_never_raised_is_no_loss() -> None:
    """It has no traceback, so no code of torch raised it."""
    assert innermost_module(None) == ""
    assert not may_be_loss(RuntimeError("Connection closed by peer"))


# -- test phases --------------------------------------------------------------------------------------
# How long a rank took from one generation to the next, by its own clock.


def test_a_rank_that_stayed_measures_one_phase_after_the_other() -> None:
    """Its collective failed before a loss was known; what it waited for word of it is a part of the detection."""
    entered = in_place_of(4, (), Leaving(failed_s=10.0, over_s=10.5, end_s=10.75), 13.0, 13.25)
    assert (entered.detect_s, entered.abort_s, entered.replace_s, entered.meet_s) == (0.5, 0.25, 2.25, 0.25)


def test_a_rank_whose_waits_were_ended_by_the_loss_waited_for_no_word_of_it() -> None:
    """The exception came after the loss was known, or there was none because its function had returned."""
    assert Leaving(failed_s=11.0, over_s=10.0, end_s=12.0).detect_s == 0.0
    assert Leaving(failed_s=float("inf"), over_s=10.0, end_s=12.0).detect_s == 0.0


def test_a_new_process_was_in_no_generation_before() -> None:
    """It has nothing to tell of the loss."""
    entered = in_place_of(4, (), None, 13.0, 13.25)
    assert (entered.detect_s, entered.abort_s, entered.replace_s, entered.meet_s) == (None, None, None, 0.25)


def test_the_log_of_rank_0_says_who_was_replaced_and_why() -> None:
    """Losses that came before the generation that it left are of an earlier line."""
    losses = (RankLoss(3, 2, "ended", False, 0.0), RankLoss(1, 4, "frozen", False, 3.0))
    entered = in_place_of(4, losses, Leaving(10.0, 10.5, 10.75), 13.0, 13.25)
    text = "generation 4: rank 1 was replaced (its process was frozen); all met: detect 3.00 s, abort 0.25 s, replace "
    assert met_text(entered, 3) == f"{text}2.25 s, meet 0.25 s"
    assert met_text(entered, 1).startswith(
        "generation 4: ranks 1, 3 were replaced (its process ended, its process was frozen); all met: detect 0.50 s"
    )
