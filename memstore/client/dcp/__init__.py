"""torch.distributed.checkpoint over the store, for any number of ranks: stages into slots, reshards on load.

A user meets it as `store.dcp_writer(step)` and `store.dcp_reader()`; exports read DCP steps through it. CASES.md lists
torch's own cases that are asked of it.

    planned --> slots taken --written--> submitted --> ticket rises
       '--a rank fails--> the step is given up on all ranks

`metadata.py` what is written, without pickle; `staging.py` one byte stream of a state; `writer.py` saves, `reader.py`
loads.
"""
