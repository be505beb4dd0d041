"""Benchmarks that need an accelerator."""
