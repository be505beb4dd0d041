"""What can be rebuilt from what survived, and how fastest? Pure."""
