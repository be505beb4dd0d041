"""The controller's state machine under test, with hosts that answer it."""
