"""When bytes of copies may leave a host: between the collectives of its ranks. Pure."""
