"""The simulated holder.

What it does is the product's code: the procedures of `core/holder`, whose port `virtual_io.py` keeps, the replica
store, the slot table, the peer server, the scrubber. What their threads wait for is a wait in virtual time, so anything
can happen in between. It also reads what was brought for a rank, as a rank does.
"""
