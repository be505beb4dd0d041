"""Threads, waits and answers between threads, safe against what a signal's handler raises."""
