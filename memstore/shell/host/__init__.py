"""Which host and which life of its holder this is, and what the machine offers.

Ranks, holders and tools ask it: the host id, the address that others should use, the limit of open files.
"""
