"""How all ranks get one step: rounds, and the staging of its shards. Pure."""
