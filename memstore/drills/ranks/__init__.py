"""The ranks of a drill, and the states that they put and compare."""
