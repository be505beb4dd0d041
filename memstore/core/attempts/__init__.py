"""How the ranks of a launch join, open an attempt and fence the older ones. Pure."""
