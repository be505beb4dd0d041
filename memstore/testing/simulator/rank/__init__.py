"""The simulated ranks."""
