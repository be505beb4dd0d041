"""In-place recovery: after a rank is lost, the others keep their processes and enter the training function again.

    @memstore.inplace.reentrant
    def train(args): ...                       # connect, get, the loop of steps, put: unchanged

What is lost is replaced by Ray Train (`memstore.adapters.ray_train`) or by `memstore.inplace.ray_actors`; they import
this room, and it knows no more than `memstore.client`. Pure, so the simulator runs it too: `membership.py`. Read
`reentry.py` first, then `meeting.py`, `reuse.py`.

    a rank      meet --all ranks--> run --return--> wait for the others' return --> done
                  '<-- yes -- was a rank lost? <-- exception, or a rank is lost; no: raise
    the server  wanted N --a rank's process ends, freezes, or its host does not answer--> broken N --> wanted N+1

- An exception's text decides nothing: its innermost frame says whether to ask for a loss, the server whether there is.
- A group's name is a count: a rank that keeps its model makes the build's groups again, in their order, so that a
  replacement finds its peers.
- What frees the training thread ends its waits with an exception; it never tears a put or an optimizer step.
"""

from memstore.inplace.reentry import Generation, generation, reentrant
from memstore.inplace.reuse import reuse

__all__ = ["Generation", "generation", "reentrant", "reuse"]
