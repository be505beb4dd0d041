"""Durable storage: files of a folder, objects of a store, and the tier over both.

Holders and `memstore verify` call it. It implements `core/durable/storage_ports.py`, and imports no other room of the
shell. `tier.py` is the entry; a folder is written with fsync and rename, and no link is followed.
"""
