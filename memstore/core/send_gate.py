"""When bytes of copies may leave a host, between its ranks' collectives, and in which portions they travel.

The senders of `shell/holder`, `shell/peer` and `shell/rank` ask it. It touches no socket and reads no clock.

    free --a rank begins a collective--> held --it ends, or 10 s--> free
      '--a newer put of the rank begins, or 60 s--> let go

Holds copies of puts back while a rank of this host has a collective under way (D87). Pure.

    rank    begin: writes the time into its mark        end: writes 0
              |                                           |
    holder  free ------------------------------------> held ---> free
              '- pieces of a copy, 2 ms of the link each  '- no piece

A rank owns its mark, 8 bytes in a file that it names to its holder once; the holder alone decides. A rank that is lost
has no mark (its link ended); one that is frozen has an old mark, which counts as none after MARK_MAX_S. A copy is let
go, whatever is marked, when a newer put of its rank begins, or after HOLD_MAX_S; so every put commits. No restore and
no repair is ever held.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memstore.core.wire.ids import Endpoint

MARK_PREFIX = "mark-"
MARK_BYTES = 8  # nanoseconds of the host's monotonic clock when the collective began; 0: none is under way
MARK_MAX_S = 10.0  # a longer collective hangs; nor is a frame that has begun held longer: its receiver gives up at 30 s
HOLD_MAX_S = 60.0  # since a copy began to travel; a read pin lives for 600 s

PIECE_S = 0.002  # time of a piece on the link: a collective meets two at most
PIECE_FIRST_BYTES = 256 << 10
PIECE_MIN_BYTES = 64 << 10  # below, system calls and wake-ups cost more than they move
PIECE_MAX_BYTES = 16 << 20
LOOK_S = 0.0005  # between two looks at what the kernel still has

Order = tuple[int, int]  # attempt and step


@dataclass(slots=True, eq=False)
class Sending:
    """One push of one put, over one connection."""

    owner: tuple[str, int]  # job and rank
    order: Order
    began_s: float
    piece_bytes: int = PIECE_FIRST_BYTES  # what the link carries in PIECE_S, as far as it is known
    given_s: float = -math.inf  # when the last piece was given to the kernel
    given_bytes: int = 0  # what it had then, that piece included

    def piece(self, now: float, asked: int, unacked: int, rtt_s: float) -> int:
        """Return how many bytes may go now so that two pieces wait at most; 0: look again after LOOK_S.

        `unacked`: what the kernel holds and the peer has not acknowledged, of which what `rtt_s` takes without a queue
        is merely on its way. A piece that left sooner than in PIECE_S doubles the next, a slow one halves it.
        """
        took_s = now - self.given_s
        if max(0.0, unacked - rtt_s * self.piece_bytes / PIECE_S) > self.piece_bytes / 2:
            if took_s > 2 * PIECE_S + rtt_s:
                if self.given_bytes - unacked < self.piece_bytes / 2:
                    self.piece_bytes = max(PIECE_MIN_BYTES, self.piece_bytes // 2)
                self.given_s, self.given_bytes = now, unacked
            return 0
        if not unacked and took_s < PIECE_S and self.given_bytes >= self.piece_bytes:  # a frame's last shows nothing
            self.piece_bytes = min(PIECE_MAX_BYTES, 2 * self.piece_bytes)
        nbytes = min(asked, self.piece_bytes)
        self.given_s, self.given_bytes = now, unacked + nbytes
        return nbytes


def is_held(now: float, sending: Sending, newest: Order, marks_s: list[float], frame_s: float) -> bool | None:
    """Say whether marks of collectives under way hold a copy back; None if it is let go, whatever they are.

    `newest`: of the rank's puts that have begun. `frame_s`: how long the frame at hand has been under way.
    """
    if sending.order < newest or now - sending.began_s > HOLD_MAX_S or frame_s > MARK_MAX_S:
        return None
    return any(0 <= now - began_s < MARK_MAX_S for began_s in marks_s)


# -- chunk batches ------------------------------------------------------------------------------------
# How the chunks of one shard are asked for or offered over several streams. Pure.


BATCH_CHUNKS_MIN, BATCH_CHUNKS_MAX = 4, 32


def batches(chunks: Sequence[int], streams: int) -> Iterator[list[int]]:
    """Cut a shard's chunks into requests: small at first, so that all streams start at once, and small at the end,
    so that they end together; large between, since every request waits for an answer."""
    least = min(BATCH_CHUNKS_MIN, max(1, -(-len(chunks) // streams)))
    first, size = 0, least
    for turn in itertools.count(1):
        left = len(chunks) - first
        if left <= 0:
            return
        count = min(size, max(least, -(-left // (2 * streams))))
        yield list(chunks[first : first + count])
        first += count
        if turn % streams == 0:
            size = min(2 * size, BATCH_CHUNKS_MAX)


# -- patches ------------------------------------------------------------------------------------------
# A chunk that differs in few blocks from one that the target has: those blocks travel. Pure.


BLOCK_BYTES_MAX = 1 << 10  # a changed row of a table takes one or two; below it, comparing takes longer
BLOCKS_MIN = 8  # of a chunk
SAMPLED_BLOCKS = 16  # a few dozen cache lines tell that all of a chunk has changed, as it does in most training


def block_bytes(nbytes: int) -> int:
    """Return the size of a chunk's blocks, a multiple of 8; the last block may be shorter."""
    return min(BLOCK_BYTES_MAX, max(8, nbytes // BLOCKS_MIN // 8 * 8))


def sampled(blocks_count: int) -> slice:
    """Return which blocks of a chunk are looked at before it is compared whole: some, spread over it."""
    return slice(None, None, max(1, blocks_count // SAMPLED_BLOCKS))


def may_pay(differing_count: int, sampled_count: int) -> bool:
    """Say after the sample whether to compare the chunk whole."""
    return 4 * differing_count <= 3 * sampled_count


def pays(patch_bytes: int, nbytes: int) -> bool:
    """Say whether a patch is sent in place of the chunk: the target copies and digests the chunk for it once more."""
    return 0 < 2 * patch_bytes <= nbytes


# -- endpoint choice ----------------------------------------------------------------------------------
# Which of a host's networks the next connection goes to: the one with the fewest, but none that failed lately. Pure.


AVOID_S = 30.0  # after a failure; what failed is used all the same where nothing else is left


class EndpointChoice:
    """The endpoints of one host. For several threads under their owner's lock."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Take them in the order in which the host names them, one at least."""
        self.all = tuple(endpoints)
        self._open: Counter[Endpoint] = Counter()
        self._failed_s: dict[Endpoint, float] = {}

    def order(self, now: float) -> list[Endpoint]:
        """Return the endpoints in the order in which a connection is to be tried."""
        return sorted(self.all, key=lambda each: (self.is_avoided(each, now), self._open[each]))

    def is_avoided(self, endpoint: Endpoint, now: float) -> bool:
        """Say whether it failed lately."""
        failed_s = self._failed_s.get(endpoint)
        return failed_s is not None and now < failed_s + AVOID_S

    def has_another(self, now: float) -> bool:
        """Say whether one of several did not fail lately."""
        return len(self.all) > 1 and not all(self.is_avoided(each, now) for each in self.all)

    def is_uneven(self, now: float) -> bool:
        """Say whether a network that may be used has no connection while another has several."""
        idle = [each for each in self.all if not self._open[each] and not self.is_avoided(each, now)]
        return bool(idle) and max(self._open.values(), default=0) > 1

    def opened(self, endpoint: Endpoint) -> None:
        """Count a connection."""
        self._open[endpoint] += 1

    def closed(self, endpoint: Endpoint) -> None:
        """Count a connection no more."""
        self._open[endpoint] -= 1

    def failed(self, endpoint: Endpoint, now: float) -> None:
        """Note that it could not be reached, or that a connection to it broke."""
        self._failed_s[endpoint] = now
