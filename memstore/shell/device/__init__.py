"""Copies between device memory and host memory, and copies that overlap training."""
