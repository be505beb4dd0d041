"""One run of a scenario from its start to its end, and campaigns of many runs."""
