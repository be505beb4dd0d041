"""One run of a scenario from its start to its end, and campaigns of many runs.

`simulation.py` is a run: cluster, launcher, faults, then healing and what must hold. `cluster.py` is the one `World`:
what starts, dies, freezes and comes back. `campaign.py` plays many seeds and shrinks failures; `corpus.py` keeps every
seed that ever failed.
"""
