"""Thin I/O around the pure core: threads, sockets, files, shared memory, torch, Ray.

It carries out what `memstore/core` decides and reports what happened; it decides nothing. Holder and controller never
import torch, and only `on_ray` imports Ray. Which room may import which, which thread runs what, and which locks it may
take in which order: docs/internals/architecture.md.
"""
