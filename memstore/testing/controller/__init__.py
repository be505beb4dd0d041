"""The controller's real state machine among the simulator's holders.

A test builds a `ControllerWorld`, launches ranks, lets virtual time pass with `run` or `run_until`, and looks at
tickets, copies and orders, on few bytes. Nothing sleeps, and a seed gives the same run again.
`fleet.py` has thousands of hosts without delays, to measure what a step costs.
"""
