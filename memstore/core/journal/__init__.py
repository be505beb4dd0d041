"""Facts that take effect once enough journals have them, and the controller's lease. Pure."""
