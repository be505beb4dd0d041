"""The simulated holder."""
