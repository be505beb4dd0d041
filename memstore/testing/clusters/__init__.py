"""Stores on one machine: plain processes, network namespaces, raylets."""
