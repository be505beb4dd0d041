"""Faults: the catalogue of their kinds, signals, damaged files, a TCP proxy and object stores that fail on demand.

Drills, nemesis and clusters share them: `processes.py` and `arena_files.py` break something and check that it is
broken, `kept_up.py` and `mounts.py` have what lasts only while something keeps it up. Rules may be changed at any time;
proxies and servers are context managers that leave nothing behind. The proxy knows memstore's frames, so that a test
can break a part of one.
"""
