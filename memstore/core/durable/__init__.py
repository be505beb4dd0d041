"""Which host writes which part of which committed step to durable storage, under which name and key.

The controller's machine orders; holders write through the Protocols of `storage_ports.py`, which `shell/durable`
implements. It knows names and formats, and no file or object store.

    none --due--> writing slices --all reported--> marking --> durable; several steps at once, each on its own
                     |--late, and its room is needed: abandoned
                     '--no writer left: failed, with the reason in status
"""
