"""Where should the copies go? Pure."""
