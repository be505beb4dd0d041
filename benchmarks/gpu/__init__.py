"""Benchmarks that need an accelerator; run once, at small size (benchmarks/notes/gpu.md).

`training.py` is a GPT in training, for `put.py` and `restore.py`.
"""
