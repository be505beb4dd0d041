"""The demo: a real model loses a machine and goes on, bit for bit, from a peer's memory.

Read in this order: `text.py` and `model.py` (what is trained), `train_loop.py` (what a user would write), `records.py`
and `checks.py` (what is claimed and how it is proved), `run.py` (the cluster, the runs) and `watcher.py` (the kill),
`report.py`, `cli.py`.
"""
