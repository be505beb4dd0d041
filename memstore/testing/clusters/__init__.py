"""Stores on one machine: plain processes, network namespaces, raylets.

Tests, drills, nemesis and benchmarks start them. All are context managers that leave no process, link, socket or arena
behind. Wait for states with `wait_for`, never with a sleep. `cluster.py` has what all back ends share.
"""
