"""The store on one thread and virtual time: real catalog, vault, slot table, peer server and planner; faults by a seed.

    scenario.py    what is tried: the cluster and a list of faults, drawn from a seed; plain data, so it can be shrunk
    world.py       virtual time, machines, the launcher; `Simulation(scenario).run()`
    control.py     controllers, their sessions and their lease; more than one may believe it is in charge
    network.py     delays, partitions, resets, flipped bytes
    memory.py      a machine's RAM file system, which outlives its holder and can be cut at any write
    holder.py      a holder: the order of the shell's threads as steps of virtual time
    transfer.py    pushes, chunk by chunk
    staging.py     what a restore brings to a host
    durable.py     durable storage and the writes to it
    faults.py      how each fault is done
    launcher.py    starts all ranks again and again
    rank.py        a training process: joins, gets, puts, checks what it is given
    natural_rank.py  the same of a rank that names its shard: two parts to put and to get
    client/shared_shard.py     how launches deal shards, and what must be true of twins
    twins.py       what a holder knows of twins, and the waits of offers
    checker.py     the invariants, looked at after every event
    campaign.py    many seeds, shrinking, reports
    corpus.py      every seed that ever failed
    planted.py     bugs put in on purpose, which the checker must find: planted_decisions.py, planted_bytes.py,
                   planted_steps.py, planted_history.py, planted_natural.py

A run depends on its scenario alone: `python -m memstore.testing.simulator --seed N` plays it again.
"""
