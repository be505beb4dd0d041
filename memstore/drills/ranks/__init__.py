"""The ranks of a drill, and the states that they put and compare.

A state follows from (seed, rank, step) and never passes through the store, so the store cannot make a wrong restore
look right. Ranks are Ray actors (`ranks.py`), forked processes for network namespaces (`rank_processes.py`), or a
training function that recovers in place (`in_place.py`). It imports no other room of drills.

    started --join--> in an attempt --leave--> idle --take--> in an attempt of the next drill
                            '-- killed by a fault, or by the restart of the job: gone
"""
