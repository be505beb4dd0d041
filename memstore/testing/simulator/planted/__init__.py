"""Bugs that are planted to see that the checks find them.

A planted bug is a patch that lasts for one run of a written scenario: a rule must break with it, and none without it.
One that only sets an attribute is a row of its file's `ROWS`. One that needs code is a function: with `at=(owner,
name)` it takes that attribute's place and gets the real one first; without, it returns the patches. Its words are its
line in the simulator's README, which a test compares. A new file of bugs goes into `FILES` of `catalogue.py`.
"""
