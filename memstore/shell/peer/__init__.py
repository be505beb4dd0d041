"""Copies of shards between holders."""
