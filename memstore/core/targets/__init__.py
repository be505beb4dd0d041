"""Which hosts hold copies of a job, and what every host must know of the others.

The controller's machine calls it as hosts come and go; where copies go is `placement`'s answer. `drain.py` hosts with
notice of their end, `shared_shards.py` which of the ranks with equal state copy.

    (none) --notice--> draining --dead, and past its time or replaced--> (none)
                          '--cancelled, or live long past its time--> (none)
"""
