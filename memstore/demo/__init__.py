"""The demo: a real training loses a machine, and goes on bit for bit from a peer's memory.

`memstore demo` plays it on the drills' embedded cluster: four runs of a small model on four hosts (uninterrupted, with
a lost host, with one in place, without restore), every loss compared. `training.py` is the loop that a user would
write; `run.py` is the entry. No other part of the product imports it.
"""
