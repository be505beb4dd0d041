"""Controllers: a real state machine each, with sessions, a lease, and its own belief to be in charge."""
