"""Bugs that are planted to see that the checks find them."""
