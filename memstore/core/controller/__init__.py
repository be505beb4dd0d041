"""The controller's state machine, and the queries that it answers.

`machine.py` is the one entry: event in, actions out. `parts.py` builds every part from the ground up: a part gets only
parts that were built before it. `reactions.py` is the page to read first. It may know everything; no other room of the
core knows it.

    settling --every expected host up, or settle_s over--> serving
    placed --a host comes or goes--> stale: nothing is committed --next tick--> placed
"""
