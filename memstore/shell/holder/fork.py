"""A host's part in a fork: manifests of a new job over slots that are there already, no byte copied (R7, R32)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import Manifest, decode_manifest, encode_manifest, shard_digest, spec_of
from memstore.core.wire.orders import ForkedShard
from memstore.core.wire.reports import ForkedDigest
from memstore.errors import DigestMismatch
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.replica_store import ReplicaStore
from recovery.inventory import ShardId


def look(vault: ReplicaStore, shards: Iterable[ForkedShard]) -> Iterator[ForkedDigest]:
    """Digest again what was verified too long ago; yield the digest under the new id of each shard that is here."""
    for item in shards:
        pinned = vault.pin(item.shard.id, item.digest)
        if pinned is None:
            continue
        try:
            manifest = _renamed(vault, pinned[0], item.new.id)
            vault.verify_old([c.digest for c in manifest.chunks], [c.nbytes for c in manifest.chunks])
            yield ForkedDigest(item.shard.rank, shard_digest(encode_manifest(manifest)), len(pinned[0].missing))
        except DigestMismatch:
            pass  # of a copy whose manifest is damaged no fork is made
        finally:
            vault.unpin(*pinned)


def make(vault: ReplicaStore, shards: Iterable[ForkedShard]) -> Iterator[StoredReplica]:
    """Store the shards under their new ids: each a manifest, and a reference more for every slot; yield each.

    A shard that is not here any more is left out. A fork's copy that lacks chunks, or its manifest, gets what is here
    now. Each shard is one step under the lock: a crash leaves its manifest whole or none, and references are counted
    from manifests (R6).

    Raises:
        CapacityError: There is no room for a manifest.
    """
    for item in shards:
        new = item.new.id
        with vault.lock:
            shelved = vault.shelf.find(item.shard.id, item.digest)
            if shelved is None:
                continue
            manifest = _renamed(vault, shelved, new)
            data = encode_manifest(manifest)
            spec = spec_of(manifest, shard_digest(data))
            known = vault.shelf.find(new, spec.digest)
            if known is None or known.missing:
                vault.manifests.save(ManifestFolder.name_of(new, spec.digest), data)
                chunks = manifest.chunks
                known = vault.shelf.adopt(new, spec, [c.digest for c in chunks], [c.nbytes for c in chunks])
                vault.flush()
        yield known


def drop_unknown_shares(vault: ReplicaStore, jobs: Collection[str]) -> None:
    """Give back room of jobs that the controller does not know, if no shard of them is here.

    A controller that died before it recorded the job left such a claim.
    """
    with vault.lock:
        drafts = {draft.shard.job for draft in vault.shelf.drafts.values()}
        known = {*jobs, *drafts, *(shard.job for shard, _ in vault.shelf.shards)}
        unknown = [job for job in vault.shelf.shares if job not in known]
        for job in unknown:
            vault.shelf.drop_share(job, vault.shelf.shares[job].attempt)
    if unknown:
        vault.room.release()


def _renamed(vault: ReplicaStore, shelved: StoredReplica, new: ShardId) -> Manifest:
    return replace(decode_manifest(vault.manifest(shelved)), shard=new)
