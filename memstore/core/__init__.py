"""Pure state machines: events in, actions out, `now` passed in. No I/O of any kind."""
