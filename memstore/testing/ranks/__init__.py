"""Ranks in processes of their own that tests command.

The state of a rank follows from (seed, rank, step) with numpy alone, so that a test makes the same bytes and compares,
without the store. `rank_process.py` forks ranks in milliseconds; `fleet.py` is a job on a ProcessCluster. Ranks as Ray
actors are those of the drills (`drills/ranks/ranks.py`).
"""
