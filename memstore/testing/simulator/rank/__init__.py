"""Training processes of a simulation, and how launches deal shards to them."""
