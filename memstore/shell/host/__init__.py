"""Which host and which life of its holder this is, and what the machine offers."""
