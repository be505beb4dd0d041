"""The controller's state machine, and the queries it answers. Pure."""
