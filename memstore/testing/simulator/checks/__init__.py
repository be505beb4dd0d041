"""The rules that a simulation is held against, one file for what they look at.

Processes and the run loop call the checks after every event; a check changes nothing in the store, and raises
`Violation` with what broke: R is a rule of PROTOCOL.md, I an invariant of the simulator's README. `checker.py` builds
all; `observed.py` is the truth that they share. R31 is looked at in `host/virtual_io.py`, offers that wait (R34) in
`host/shared_shards.py`. A rule that no check looks at needs one, and a planted bug in `planted/` that proves it.
"""
