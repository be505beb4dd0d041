"""The demo: a real training loses a machine, and goes on bit for bit from a peer's memory; README.md has the files."""
