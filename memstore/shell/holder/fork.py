"""A host's part in a fork: manifests of a new job over slots that are there already, no byte copied (R7, R32)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.format.manifest import Manifest, decode_manifest, encode_manifest, shard_digest, spec_of
from memstore.core.wire.messages import Body, shard_from_wire
from memstore.errors import DigestMismatch
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.arena.replica_store import ReplicaStore
from recovery.inventory import ShardId


def look(replicas: ReplicaStore, shards: Collection[Any]) -> list[list[Any]]:
    """Digest again what was verified too long ago; return [rank, digest under the new id, chunks lacking] (R13)."""
    found: list[list[Any]] = []
    for item in shards:
        shard, digest, new = shard_from_wire(item[0]), str(item[1]), shard_from_wire(item[2])
        pinned = replicas.pin(shard, digest)
        if pinned is None:
            found.append([shard.rank, "", -1])
            continue
        try:
            manifest = _renamed(replicas, pinned[0], new)
            replicas.verify_old([c.digest for c in manifest.chunks], [c.nbytes for c in manifest.chunks])
            found.append([shard.rank, shard_digest(encode_manifest(manifest)), len(pinned[0].missing)])
        except DigestMismatch:
            found.append([shard.rank, "", -1])  # of a copy whose manifest is damaged no fork is made
        finally:
            replicas.unpin(*pinned)
    return found


def make(replicas: ReplicaStore, shards: Collection[Any]) -> Iterator[StoredReplica]:
    """Store the shards under their new ids: each a manifest, and a reference more for every slot; yield each.

    A shard that is not here any more is left out. A fork's copy that lacks chunks, or its manifest, gets what is here
    now. Each shard is one step under the lock: a crash leaves its manifest whole or none, and references are counted
    from manifests (R6).

    Raises:
        CapacityError: There is no room for a manifest.
    """
    for item in shards:
        shard, digest, new = shard_from_wire(item[0]), str(item[1]), shard_from_wire(item[2])
        with replicas.lock:
            shelved = replicas.index.find(shard, digest)
            if shelved is None:
                continue
            manifest = _renamed(replicas, shelved, new)
            data = encode_manifest(manifest)
            spec = spec_of(manifest, shard_digest(data))
            known = replicas.index.find(new, spec.digest)
            if known is None or known.missing:
                replicas.manifests.save(ManifestFolder.name_of(new, spec.digest), data)
                chunks = manifest.chunks
                known = replicas.index.adopt(new, spec, [c.digest for c in chunks], [c.nbytes for c in chunks])
                replicas.flush()
        yield known


def forked_body(body: Body, shards: list[list[Any]]) -> Body:
    """Return the report of a look."""
    return {"job": body["job"], "call": body["call"], "shards": shards}


def drop_unknown_shares(replicas: ReplicaStore, jobs: Collection[str]) -> None:
    """Give back room of jobs that the controller does not know, if no shard of them is here.

    A controller that died before it recorded the job left such a claim.
    """
    with replicas.lock:
        drafts = {draft.shard.job for draft in replicas.index.drafts.values()}
        known = {*jobs, *drafts, *(shard.job for shard, _ in replicas.index.shards)}
        unknown = [job for job in replicas.index.shares if job not in known]
        for job in unknown:
            replicas.index.drop_share(job, replicas.index.shares[job].attempt)
    if unknown:
        replicas.room.release()


def _renamed(replicas: ReplicaStore, shelved: StoredReplica, new: ShardId) -> Manifest:
    return replace(decode_manifest(replicas.manifest(shelved)), shard=new)
