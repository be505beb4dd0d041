"""One host's arena: its folder, its file of slots, their headers, the manifests, its lock.

The holder owns it, a rank maps it, and a tool looks at its folder. Which slot is whose, and the order of writes, is
the answer of the replica store in `core/arena`, which `arena.py` opens on a folder.
"""
