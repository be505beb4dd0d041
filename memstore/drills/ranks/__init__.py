"""The ranks that train under a drill."""
