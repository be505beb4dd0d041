"""The rules that a simulation is held against, one file for each property."""
