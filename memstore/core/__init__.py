"""Everything that the store decides, as pure state machines: events in, actions out, `now` passed in.

No I/O of any kind: threads, sockets and files are in `memstore/shell`, and a test refuses imports that act. The core
knows `placement`, `recovery`, `memstore.config` and `memstore.errors`; which of its rooms may import which is drawn in
`tests/house/test_rooms.py`.

The entry of the controller's half is `ControllerMachine.handle` in `controller/machine.py`; the controller's process,
the simulator and the tests are three shells around it. What a holder does is in `holder/`. Read
`controller/reactions.py` first: what follows from what.
"""
