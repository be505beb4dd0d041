"""Out and in: a committed step as a folder of stock files, a DCP directory as the step of a job, arenas without Ray.

    dcp           A directory that dcp.load reads, with any world size, written by torch's FileSystemWriter. A step of
                  store.put: DTensors are parts of their global tensor; all else is the first rank's under DCP's
                  name, and where another rank's differs, that rank's, too, as `rank00003.<name>`.
    safetensors   The global tensors of the same names, in files of bounded size with an index, out of the DCP files.

An export joins no job and fences no attempt. It writes beside the target and renames at the end, so that the target is
whole or absent; `memstore.json` in it says what it is and what is not in it. Bytes are digested after they left the
store and before they are written; one rank's shard of a put step is in this memory at a time, of a DCP step 256 MiB.
An import reads with torch's FileSystemReader, and unpickles nothing but a list of harmless classes.

Reading order: `step_items`, `exporting`, `importing`; `salvaging`, which needs none of them, no torch and no store.
"""

from collections.abc import Callable

Progress = Callable[..., object]
"""Takes how many bytes more are done, and by name the `total` once it is known."""
