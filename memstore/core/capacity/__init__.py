"""Room for a job's steps: reserved at its first put, given back when a newer step is committed. Pure."""
