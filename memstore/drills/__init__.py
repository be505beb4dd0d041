"""Drills: scripted faults with a promised outcome, proved on the bytes.

A drill breaks something on purpose, checks that it is broken, lets the store recover, and compares every byte with
states that never passed through the store: PASS, FAIL (a broken promise) or ERROR (the drill itself did not work).
`memstore drill` plays them, and so do tests and benchmarks.

Read `model/catalogue.py`, `scenes/scene.py`, one of `scenes/scenes_*.py`, `run/runner.py`. The runner
builds a DrillContext (`sites/scratch.py`) for scene and flow. To add a drill: an entry in the catalogue and a scene
of the same `name`; a new file of scenes goes into `_FILES` of `run/runner.py`.
"""
