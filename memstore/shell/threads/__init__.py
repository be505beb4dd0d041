"""Priority of threads, waits and answers between threads, safe against exceptions of signal handlers.

A handler may raise between any two steps of the main thread; `waits.py` has the condition and the event that
such an exception cannot tear. All rooms of the shell may use it; it imports none.
"""
