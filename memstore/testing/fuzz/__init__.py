"""Fuzzers for every decoder of foreign bytes."""
