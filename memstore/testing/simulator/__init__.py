"""The whole store on one thread and virtual time, with faults drawn from a seed.

README.md is the map. A run depends on its scenario alone: `python -m memstore.testing.simulator --seed N` plays it
again.
"""
