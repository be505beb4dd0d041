"""One run of a scenario from its start to its end, and campaigns of many runs.

`campaign.py` has a run: cluster, launcher, faults, then healing and what must hold; it plays many seeds and shrinks
failures. `cluster.py` is the one `World`: what starts, dies, freezes and comes back. `controller.py` has controllers,
each a real state machine: several may live at once, until a lease, a holder or Ray's store says otherwise (R17).
`record.py` keeps every seed that ever failed.
"""
