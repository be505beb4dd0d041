"""Fuzzers of every decoder of foreign bytes."""
