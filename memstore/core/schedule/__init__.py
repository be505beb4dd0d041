"""How often to put and how often to write to durable storage. Pure."""
