"""The store as a whole, from Python: start, status, stop, and the stores of this machine.

The command line, the drills and a `connect` that finds no store call it. It knows shell and core, and no Store of a
rank: nothing of `memstore.client`.
"""
