"""One host's arena: its folder, its file of slots, the replicas in it."""
