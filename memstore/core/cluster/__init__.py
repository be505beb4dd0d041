"""The controller's state: facts, hosts, jobs, steps. Pure."""
