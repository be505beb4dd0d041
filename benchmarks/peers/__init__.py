"""What a user would pick instead of memstore, each in an environment and processes of its own, timed beside it."""
