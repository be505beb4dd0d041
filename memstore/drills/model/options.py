"""The options of one drill, and the command that plays it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.config import MIB, Config

DURABLE_EVERY = (
    1_000_000_000  # in steps; so only the first committed step becomes durable, and a durable restore is an older step
)


@dataclass(frozen=True)
class Options:
    """The choices of a person for one drill. Sizes are per rank and step."""

    seed: int = 0
    is_beyond: bool = False
    ranks_count: int = 4
    nbytes: int = 8 * MIB
    config: Config = field(default_factory=Config)  # its job fields are used for the scratch job
    victim: str | None = None
    allows_data_loss: bool = False
    is_altered: bool = False  # for tests: flip one restored bit, so that the comparison fails


def replay(name: str, options: Options, *, store: str | None, durable: str | None) -> str:
    """Return the command that plays the same drill again.

    Args:
        store: Name of the running store; None for an embedded cluster.
        durable: The directory that the person named; None if there was none or the drill made one.
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
