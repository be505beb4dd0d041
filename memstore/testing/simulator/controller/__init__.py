"""Controllers: a real state machine each, with sessions, a lease, and its own belief to be in charge.

Several may live at once: a fault can freeze one or start another, until a lease, a holder or Ray's store says otherwise
(R17).
"""
