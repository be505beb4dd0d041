"""Ranks in processes of their own, driven by a test."""
