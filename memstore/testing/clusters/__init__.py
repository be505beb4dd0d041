"""Stores on one machine: processes, namespaces, embedded Ray."""
