"""What a training loop calls: connect, Store, tickets, checkpoints, readers.

It runs in the training process. Adapters, in-place recovery and exports stand on it; it knows `memstore.admin` only to
start an absent store, and the controller only by the calls that its holder passes on.

A put:

    begun --reserved, slots taken--> copied --submitted--> the holder's; its levels come back as events
      '--none free in time, or not copied--> skipped: all ranks give the step up alike

Read `store.py` first: every verb of a rank; then `puts.py`, `whole_get.py`, `reader.py`.
"""
