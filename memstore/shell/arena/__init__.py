"""One host's arena: its folder, its file of slots, the replicas in it.

The holder owns it, a rank maps it, and a tool looks at its folder. Which slot is whose is `core/arena`'s answer. The
order of writes is R7, so that a crash at any point loses nothing that was acknowledged:

    In:  bytes, digest, slot header, manifest (temporary file + rename), acknowledge
    Out: unlink the manifest, then free the slots

Read `replica_store.py` first: index, bytes, headers and manifests behind one lock.
"""
