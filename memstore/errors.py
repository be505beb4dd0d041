"""Every error memstore raises, as one tree. Imports nothing of ours.

    MemstoreError(Exception)        message + keyword context kept as attributes
    ├─ ConfigError                  a field, its value, the allowed range           (also a ValueError)
    ├─ CapacityError                bytes asked, bytes there, what would free them
    │  └─ GrowthRefused             some ranks' states outgrew the prepared room, others' did not: steps skipped (R12)
    ├─ ClosedError                  you closed it
    ├─ FencedError                  a newer attempt of the job has been opened (R20, R21)
    ├─ JobBusyError                 another launch of the job is alive (R20)
    ├─ UnsupportedState             an object in the state, by path and type        (also a TypeError)
    ├─ WorldSizeError               the step was put by another world size (R27)
    ├─ TransportError               the world broke it
    │  ├─ PeerUnreachable           host, address
    │  ├─ PeerTimeout               operation, waited_s, limit_s                    (also a TimeoutError)
    │  ├─ PeerRefused               a peer has no room or fences us; is_final: waiting cannot help
    │  ├─ ProtocolError             bad magic, version, length or order
    │  └─ AuthenticationError       the other side does not know the store's secret
    ├─ IntegrityError               bytes differ from their digest or manifest
    │  ├─ DigestMismatch            shard, holder, expected, actual
    │  └─ ManifestMismatch          what differs, first differing path
    ├─ CommitError                  the level asked for cannot be reached any more (R15)
    │  └─ StepConflict              a step going backwards along the lineage
    ├─ RecoveryError                a get that cannot return a whole step (R23)
    │  ├─ LoadError                 an object did not take its state: what raised, what was written by then
    │  ├─ StepDropped               newer steps were committed before a reader had copied it out
    │  │  └─ LeaseLost              its lease was over by then (R36)
    │  ├─ NoNewerStep               wait_newer() waited in vain                    (also a TimeoutError)
    │  └─ GatherTimeout             ranks that did not arrive                       (also a TimeoutError)
    ├─ DrillError                   a drill could not cause its fault: no verdict
    └─ InternalError                an invariant of ours broke: carries the story

Constructor: one positional message plus keyword context, so that default pickling works and
every error survives a Ray actor boundary. Message shape: what happened, with which values,
against which limit, what to do.
"""

from __future__ import annotations

from typing import Any


class MemstoreError(Exception):
    """Base of every memstore error; keyword context becomes attributes."""

    def __init__(self, message: str = "", **context: Any) -> None:
        super().__init__(message)
        self.__dict__.update(context)


class ConfigError(MemstoreError, ValueError):
    """A configuration value, or two values that contradict each other."""


class CapacityError(MemstoreError):
    """The bytes asked for do not fit under a named limit; nothing was stored or lost."""


class GrowthRefused(CapacityError):
    """A state has outgrown its share, other ranks' have not or they put already: its steps are skipped by all (R12)."""


class ClosedError(MemstoreError):
    """The store, reader or ticket was closed by its owner."""


class FencedError(MemstoreError):
    """This process belongs to an attempt that a newer one has fenced (R21)."""


class JobBusyError(MemstoreError):
    """Another launch of the job is alive and active; names host, pid and step (R20)."""


class UnsupportedState(MemstoreError, TypeError):
    """An object in the state cannot be stored without pickle; names path and type."""


class WorldSizeError(MemstoreError):
    """The step was put by another world size; names both and the way on (R27)."""


class TransportError(MemstoreError):
    """A connection, a peer or a deadline failed."""


class PeerUnreachable(TransportError):
    """Nothing answers at a peer's address."""


class PeerTimeout(TransportError, TimeoutError):
    """A peer did not answer within the limit; names the operation and the setting to raise."""


class PeerRefused(TransportError):
    """A peer will not take a copy; `is_final` says that waiting cannot help."""


class ProtocolError(TransportError):
    """Bytes that are not a valid frame, or a frame that may not come now."""


class AuthenticationError(TransportError):
    """The other side could not prove that it knows the store's secret, or speaks for another host than it proved."""


class IntegrityError(MemstoreError):
    """Bytes differ from those that were put."""


class DigestMismatch(IntegrityError):
    """A digest differs from the one taken at put; names shard, holder, both digests."""


class ManifestMismatch(IntegrityError):
    """The state given to `into=` or a manifest does not match; names the first difference."""


class CommitError(MemstoreError):
    """A ticket's step cannot reach the level that was asked for any more (R15)."""


class StepConflict(CommitError):
    """A put whose step does not follow the lineage: steps must strictly increase."""


class RecoveryError(MemstoreError):
    """No whole step can be restored; lists each step and what it lacks, newest first (R23)."""


class LoadError(RecoveryError):
    """An object of `into=` did not take the state that was brought for it; nothing was adopted (R23)."""


class StepDropped(RecoveryError):
    """A step was dropped while a reader copied it out: newer ones are committed, and puts need its room (R7)."""


class LeaseLost(StepDropped):
    """A step was dropped although its reader had leased it: the lease was over, or had no room (R36)."""


class NoNewerStep(RecoveryError, TimeoutError):
    """No step newer than the reader's was committed in time."""


class GatherTimeout(RecoveryError, TimeoutError):
    """Not every rank made the collective call in time; names the missing ranks."""


class DrillError(MemstoreError):
    """A drill could not cause its fault, such as destroy the memory that it names; so it proves nothing."""


class InternalError(MemstoreError):
    """An invariant of memstore broke; `story` holds the events that led there. Please report it."""
