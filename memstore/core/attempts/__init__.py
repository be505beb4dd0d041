"""How the ranks of a launch join, how an attempt opens as one fact, how older attempts are fenced.

The controller's machine calls it. `join.py` is the entry; `in_place.py` belongs to recovery in place.

    joins --all ranks of one key--> (durable markers listed) --fact spread--> fencing --all holders answered--> open
      '--deadline, or a newer launch--> refused                                   open --all ranks closed--> closed
"""
