"""What runs in C where the native helper was built: copies and transfers with digests, sums of parity.

Everything works without it; `extension.py` says whether it is there, and callers take those of `loops.py`
only then.
"""
