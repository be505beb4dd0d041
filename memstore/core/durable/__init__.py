"""Which host writes which part of which committed step to durable storage, under which name and key.

The controller's machine orders; holders write through the Protocols of `storage_ports.py`, which `shell/durable`
implements. It knows names and formats, and no file or object store.

    idle --due--> writing slices --all reported--> marking --> done: idle
                     |--next is due: abandoned
                     '--no writer left--> idle, with the reason in status
"""
