"""What a holder does, written once, without threads, sockets or a clock.

Each procedure is a generator that yields effects (`effects.py`); it reads and changes the holder's state (`state.py`)
only between yields. `shell/holder/runner.py` runs it on a thread and carries effects out by calls that block;
`testing/simulator/host/driver.py` runs the same code in virtual time, so what the simulator finds here is a bug of the
product. Each procedure's file begins with a picture of its states.

Between two yields a procedure has the state to itself; what it read before a yield may differ after it. A process that
stops ends it at any yield, so its `finally` must not yield. An effect may block, and runs beside everything else; what
cannot wait (a report, a pin that is released) is a plain call. Errors other than MemstoreError are yielded as
`Unexpected`, which the simulator takes for a failed run.
"""
