"""When a step is committed, and when it is given up on all ranks. Pure."""
