"""What runs in C where the native helper was built: copies and transfers with digests.

Everything works without it; `extension.py` says whether it is there, and callers take the loops of `copy_loops.py` and
`socket_loops.py` only then.
"""
