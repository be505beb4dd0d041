"""A host's part in a fork: manifests of a new job over slots that are there already, no byte copied (R7, R32)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from memstore.core.format.manifest import decode_manifest, encode_manifest, shard_digest
from memstore.core.holder.effects import OnStore, Procedure, Warn
from memstore.core.holder.inventory import report_copy
from memstore.core.holder.state import HolderState
from memstore.core.wire.orders import LookAtCopies, MakeFork
from memstore.core.wire.reports import CopiesLookedAt, ForkedDigest
from memstore.errors import CapacityError, DigestMismatch


def look(state: HolderState, order: LookAtCopies) -> Procedure[None]:
    """Verify the shards that a fork is to be made of, and report those that are here."""
    found: list[ForkedDigest] = []
    for item in order.shards:
        pinned = state.store.pin(item.shard.id, item.digest)
        if pinned is None:
            continue
        try:
            manifest = decode_manifest((yield OnStore(partial(state.store.manifest, pinned[0]))))
            chunks = manifest.chunks
            yield OnStore(partial(state.store.verify_old, [c.digest for c in chunks], [c.nbytes for c in chunks]))
            digest = shard_digest(encode_manifest(replace(manifest, shard=item.new.id)))
            found.append(ForkedDigest(item.shard.rank, digest, len(pinned[0].missing)))
        except DigestMismatch:
            pass  # of a copy whose manifest is damaged no fork is made
        finally:
            state.store.unpin(*pinned)
    state.report(CopiesLookedAt(job=order.job, call=order.call, shards=tuple(found)))


def make(state: HolderState, order: MakeFork) -> Procedure[None]:
    """Store the shards under their new ids and report each; one that is not here any more is left out.

    What cannot be made now is ordered again.
    """
    try:
        for item in order.shards:
            made = yield OnStore(partial(state.store.fork, item.shard.id, item.digest, item.new.id))
            if made is not None:
                report_copy(state, made)
    except (CapacityError, DigestMismatch) as exc:
        yield Warn(f"host {state.host_id}, fork: {exc}")
