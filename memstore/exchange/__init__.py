"""In and out: a committed step as files that stock libraries read, and such files as a step of a new job.

The formats, for a step that `store.put` made and for one that was saved through DCP:

    torch         put: `rank_00000.pt` per rank, what the rank put, for torch.load. A DTensor is there as the rank's own
                  part; torch.load(weights_only=True) reads everything but numpy objects and a few containers, and the
                  report names what it does not. DCP: refused; `--format dcp`, then torch's own dcp_to_torch.
    dcp           A directory that dcp.load and FileSystemReader read, with any world size. DCP: the step's own
                  metadata, its storage written again. put: DTensors are parts of their global tensor; what is equal on
                  all ranks that have it stands there once, under DCP's names; what differs stands there once per rank,
                  as `rank00003.<name>`.
    safetensors   The global tensors of the same names, in files of bounded size with an index; objects and what
                  safetensors has no type for are named in the report.

and back:

    torch         a put step with as many ranks as there are files
    dcp           a DCP step, which dcp.load reads with any world size
    safetensors   a DCP step of whole tensors

An export joins no job and fences no attempt. It writes beside the target and renames at the end, so that the target is
whole or absent; `memstore.json` in it says what it is and what is not in it. Bytes are digested after they left the
store and before they are written; never more than one window, one tensor or one rank's shard is in this memory (a file
of safetensors, too). Nothing that is imported is unpickled but under a list of harmless classes.

Reading order: `shard_bytes`, `put_tree`, `step_view`, `dcp_files`, `safetensors_files`, `exporting`; for imports
`dcp_shares`, `importing`.
"""
