"""Faults, and the checks that they took effect."""
