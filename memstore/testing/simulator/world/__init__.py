"""The simulated machines: virtual time, network, memory, launcher."""
