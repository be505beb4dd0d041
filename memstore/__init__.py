"""memstore: every step's checkpoint in the memory of the training hosts, replicated to peers."""
