"""What a holder does, written once, without threads, sockets or a clock.

Each procedure is a coroutine over one port (`holder_io.py`); it reads and changes the holder's state (`state.py`) only
between awaits. `shell/holder/blocking_io.py` keeps the port by calls that block, on threads;
`testing/simulator/host/virtual_io.py` keeps it in virtual time, so what the simulator finds here is a bug of the
product. Each procedure's file begins with a picture of its states.

Between two awaits a procedure has the state to itself; what it read before may differ after one. A process that stops
ends it at any await, so its `finally` must not await. A call of the port may block, and runs beside everything else;
what cannot wait (a report, a pin that is released) is a plain call. Errors other than MemstoreError go to
`unexpected`, which the simulator takes for a failed run.
"""
