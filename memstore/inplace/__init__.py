"""In-place recovery: after a rank is lost, the others keep their processes and enter the training function again.

    @memstore.inplace.reentrant
    def train(args): ...                       # connect, get, the loop of steps, put: unchanged

What is lost is replaced by Ray Train (`memstore.adapters.ray_train`) or by `memstore.inplace.ray_actors`.
"""

from memstore.inplace.generation import Generation, generation
from memstore.inplace.reentry import reentrant
from memstore.inplace.reuse import reuse

__all__ = ["Generation", "generation", "reentrant", "reuse"]
