"""States and steps that tests store."""
