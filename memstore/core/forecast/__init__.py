"""How much of its time a job of many hosts would train, in simulated time: `memstore simulate`.

No part of a running store asks it. Randomness comes as a generator, `stepfun.json` as rows; the command line reads it.

    failures: when which hosts fail --> runs: what a policy makes of them, from failure to failure
    policies: what saves, losses and restores cost
"""
