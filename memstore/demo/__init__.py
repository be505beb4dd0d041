"""The demo: a real training loses a machine, and goes on bit for bit from a peer's memory.

Reading order: `text.py` and `model.py` (the data and the model), `train_loop.py` (the code a user would write),
`records.py` and `checks.py` (the claims and their proof), `run.py` (the cluster and the runs), `watcher.py` (the kill),
`report.py`, `cli.py`.
"""
