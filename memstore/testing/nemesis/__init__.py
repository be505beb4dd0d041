"""The nemesis: random faults against real processes, and an oracle that shares no code with the store or its drills.

Run it with `python -m memstore.testing.nemesis --minutes 20`; README.md is the map.
"""
