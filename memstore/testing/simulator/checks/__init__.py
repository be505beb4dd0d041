"""Scenarios, the rules that are checked, and the record of seeds played."""
