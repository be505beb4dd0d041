"""torch.distributed.checkpoint over the store: a StorageWriter that stages into slots, a StorageReader that reshards.

`metadata.py` what is written, `staging.py` staging, `writer.py` saves, `reader.py` loads.
A user meets them as `store.dcp_writer(step)` and `store.dcp_reader()`.
"""
