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


def replay(name: str, options: Options, *, store: str | None, durable: str | None) -> str:
    """Return the command that plays the same drill again.

    Args:
        store: Name of the running store; None: an embedded cluster.
        durable: The directory that a person named; None: none was, or one was made.
    """
    usual = Options()
    words = ["memstore drill", name, f"--seed {options.seed}"]
    words += ["--embedded"] if store is None else []
    words += ["--beyond"] if options.is_beyond else []
    values = (
        ("hosts", options.ranks_count, usual.ranks_count),
        ("replicas", options.config.replicas, usual.config.replicas),
        ("mbytes", options.nbytes // MIB, usual.nbytes // MIB),
        ("durable", durable, None),
        ("victim", options.victim, None),
        ("store", store, None if store is None else Config.store),
    )
    return " ".join([*words, *(f"--{key} {value}" for key, value, default in values if value != default)])
