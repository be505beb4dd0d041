"""The plain values of a drill: its promise, its options, its entry in the catalogue, its report.

All other rooms of drills stand on it. It imports none of them, and neither Ray nor torch: `memstore drill list` is fast
and works anywhere.

A drill's flow is `restart` (a launcher restarts the ranks, which get), `goes-on` (the ranks go on training) or
`in-place` (lost ranks are replaced, the others stay), each with limits of its promise. A play beyond the tolerance
(`--beyond`) is promised a refusal on every rank, or the durable step.
"""
