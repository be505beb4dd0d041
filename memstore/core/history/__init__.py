"""What outlives an attempt: pins, the removal of jobs. Pure."""
