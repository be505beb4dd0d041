"""The controller's process: sessions to all holders, a clock, the state machine between them."""
