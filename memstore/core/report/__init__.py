"""What people and metrics see of a store.

The controller's machine asks it for events, status and problems; the command line prints its rows. Recording never
breaks a decision, and no room below imports this one. `problems.py`: every problem with cause, time and remedy.
"""
