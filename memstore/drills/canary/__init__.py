"""A drill beside live jobs, in room that they do not need."""
