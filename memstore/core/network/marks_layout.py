"""The file in which a rank marks its collectives for its host's holder. Pure.

The rank maps the file and writes; the holder reads it with pread, so that a rank that cuts the file short harms no
other process.

    u64 marks ever made | ring of RING u64: nanoseconds of the host's monotonic clock << 2 | kind

Two stores may become visible in the other order (not on x86): the holder waits for a mark that is older than the one
before it. The file has no name any more once the holder has opened it; for a holder that comes back there is a new one.
"""

from __future__ import annotations

RING = 8191  # marks: some iterations of a model with a thousand collectives
FILE_BYTES = 8 * (RING + 1)
PREFIX = "marks-"
