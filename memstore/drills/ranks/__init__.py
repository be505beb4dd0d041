"""The ranks of a drill: they carry out the commands of `memstore.testing.ranks.rank`, or recover in place.

Ranks are Ray actors, or forked processes for network namespaces (`ranks.py`), or a training function that recovers in
place (`in_place.py`). It imports no other room of drills.

    started --connect--> in an attempt --close--> idle --take--> in an attempt of the next drill
                            '-- killed by a fault, or by the restart of the job: gone
"""
