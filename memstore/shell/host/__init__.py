"""The identity of this host and of its holder's life, and the resources of the machine."""
