"""Training processes of a simulation, and how launches deal shards to them.

A rank mirrors `shell/rank/holder_link.py` and `client/shared_shard.py`; the loop around a process in place is mirrored
too, and what it decides is `inplace/membership.py` itself. It talks to its holder through `world/world.py`.
"""
