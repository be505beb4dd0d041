"""The canary: a drill beside live jobs, in memory that they do not need."""
