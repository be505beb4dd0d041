"""Runs benchmarks in turns, keeps their records, renders the page.

Interleaved rounds, medians and ratios in `harness.py`; `targets.py` says what is promised, and where a missed line is
explained. It imports the version of memstore, and nothing else of it.
"""
