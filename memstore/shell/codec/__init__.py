"""From a live state to its stored bytes and back; nothing is pickled.

The client's puts and gets call it. `walk.py` refuses what cannot be stored, `encode.py` plans a state and copies it
straight into slots, `decode.py` builds it again, new or in place, once `match.py` has compared every shape. It knows no
holder: bytes come through the port `ByteStream` of `decode.py`.
"""
