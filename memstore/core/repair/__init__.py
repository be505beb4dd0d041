"""How missing copies are made again, and surplus ones dropped. Pure."""
