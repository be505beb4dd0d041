"""What benchmarks run on: stores, ranks, floors to compare with.

The floors, raw copies and raw connections, import nothing of memstore.
"""
