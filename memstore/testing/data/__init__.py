"""Steps with known bytes that tests store and read."""
