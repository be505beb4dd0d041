"""Runs benchmarks in turns, keeps their records, renders the page."""
