"""The simulated holder.

What it does is the product's code: the procedures of `core/holder`, run by `driver.py`, the replica store, the slot
table, the peer server, the scrubber. What their threads wait for is a wait in virtual time, so anything can happen in
between. Files with the names of procedures begin them, and carry out effects that need more than the driver has.
"""
