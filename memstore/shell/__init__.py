"""Thin I/O around the pure core: holds resources, decides nothing."""
