"""Ranks in processes of their own that tests command.

The state of a rank follows from (seed, job, attempt, rank, step) with numpy alone (`states.py`), so that anyone makes
the same bytes and compares, without the store. `rank.py` has the commands of a rank, for tests, nemesis and drills;
`rank_process.py` forks ranks in milliseconds; `fleet.py` is a job on a ProcessCluster.
"""
