"""Which hosts hold copies of a job, and what every host must know of the others. Pure."""
