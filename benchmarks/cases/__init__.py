"""The benchmarks, one file for each question.

Each says in its first lines what it measures and beside what; `python -m benchmarks --full --only NAME` runs one.
"""
