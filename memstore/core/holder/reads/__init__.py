"""What a holder brings here for readers, and from where.

`stage.py` brings a whole shard, `partial_read.py` some chunks; `fetch.py` asks peers and storage, `direct_read.py`
names hosts that a reader itself asks; `reader_pins.py` pins slots for readers. It may know all of `core/holder`.
"""
