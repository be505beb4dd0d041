"""A nemesis: random faults against real processes, and an oracle that shares no code with the store or its drills.

Read `schedule` (what a round is), `faults` (what breaks), `oracle` and `ledger` (what must come back), `checks`, then
`round`. Run it with `python -m memstore.testing.nemesis --minutes 20`.
"""
