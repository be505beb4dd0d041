"""Bugs that are planted to see that the checker finds them."""
