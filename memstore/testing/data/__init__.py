"""Steps with known bytes that tests store and read.

`durable_steps.py` for tests of every implementation of the durable port, `exchange_steps.py` for exports and imports.
"""
