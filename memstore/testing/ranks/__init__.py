"""Ranks in processes of their own that tests command."""
