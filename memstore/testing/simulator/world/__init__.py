"""The ground: virtual time, network, memories, durable storage, scenarios, and the protocols of what lives there."""
