"""What a person may choose about one drill."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.config import MIB, Config

DURABLE_EVERY = 1_000_000_000  # steps: the first committed step only, so that the durable step is an older one


@dataclass(frozen=True)
class Options:
    """Sizes are per rank and step."""

    seed: int = 0
    is_beyond: bool = False
    ranks_count: int = 4
    nbytes: int = 8 * MIB
    config: Config = field(default_factory=Config)  # its job fields are the drill's
    victim: str | None = None
    allows_data_loss: bool = False
    is_altered: bool = False  # spoil one restored bit, so that a test sees the comparison fail
