"""Proxies and servers that fail on demand."""
