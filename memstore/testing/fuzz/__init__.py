"""Fuzzers for every decoder of foreign bytes, and for remembered plans.

A decoder must turn any bytes into a value or a MemstoreError, and allocate little; `targets.py` has one target for
each, which Hypothesis calls in `make test`. Known plans swap, tie, move and free tensors between puts: what a
remembered plan stores has to be what a fresh walk stores.

    make fuzz                                             # coverage-guided, all targets; needs the `fuzz` extra
    python -m memstore.testing.fuzz manifest 60           # one target, for 60 seconds; findings in build/fuzz
"""
