"""A host's part in a fork: manifests of a new job over slots that are there already, no byte copied (R7, R32)."""

from __future__ import annotations

from functools import partial
from typing import Any

from memstore.core.format.manifest import encode_manifest, shard_digest
from memstore.core.holder.effects import OnStore, Steps, Warn
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import Body, shard_from_wire
from memstore.errors import CapacityError, DigestMismatch


def look(state: HolderState, body: Body) -> Steps[None]:
    """Verify the shards that a fork is to be made of, and report [rank, digest under the new id, chunks lacking]."""
    found: list[list[Any]] = []
    for item in body["shards"]:
        found += [(yield from _look(state, *item))]
    state.report("forked", {"job": body["job"], "call": body["call"], "shards": found})


def _look(state: HolderState, item: Any, digest: str, renamed: Any) -> Steps[list[Any]]:
    shard, new = shard_from_wire(item), shard_from_wire(renamed)
    pinned = state.store.pin(shard, digest)
    if pinned is None:
        return [shard.rank, "", -1]
    try:
        manifest = yield OnStore(partial(state.store.renamed, pinned[0], new))
        return [shard.rank, shard_digest(encode_manifest(manifest)), len(pinned[0].missing)]
    except DigestMismatch:
        return [shard.rank, "", -1]  # of a copy whose manifest is damaged no fork is made
    finally:
        state.store.unpin(*pinned)


def make(state: HolderState, body: Body) -> Steps[None]:
    """Store the shards under their new ids and report each; one that is not here any more is left out.

    What cannot be made now is ordered again.
    """
    try:
        for item, digest, renamed in body["shards"]:
            fork = partial(state.store.fork, shard_from_wire(item), digest, shard_from_wire(renamed))
            made = yield OnStore(fork)
            if made is not None:
                state.sealed(made, None)
    except (CapacityError, DigestMismatch) as exc:
        yield Warn(f"host {state.host_id}, fork: {exc}")
