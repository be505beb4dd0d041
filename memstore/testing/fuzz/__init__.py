"""Fuzzers for every decoder of foreign bytes, and for remembered plans."""
