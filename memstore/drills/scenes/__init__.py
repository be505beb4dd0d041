"""The scenes: what each drill breaks, and how it checks that it is broken."""
