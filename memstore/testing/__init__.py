"""The test kit: clusters, ranks, faults and a simulator for the tests of memstore and of its users.

Tests, drills, demo and benchmarks run on it; no other part of the product imports it. What the controller decides:
`controller/`, fast and step by step. Whether rules hold under many faults: `simulator/`, one thread and virtual time.
What processes, sockets, files and signals do: `clusters/` with `ranks/` and `faults/`. Whether the promise holds when
real processes meet random faults for hours: `nemesis/`.
"""
