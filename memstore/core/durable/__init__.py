"""Who writes which committed step to durable storage, under which names and keys. Pure."""
