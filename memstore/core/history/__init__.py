"""What outlives an attempt: pins, forks, the removal of jobs. Pure."""
