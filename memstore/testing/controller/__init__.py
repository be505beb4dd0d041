"""The controller's real state machine among fake holders."""
