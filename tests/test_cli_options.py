"""How `memstore` takes the names of hosts that people type (R1)."""

from __future__ import annotations

import pytest

from memstore.cli.options import check_host
from memstore.errors import ConfigError


def test_a_hostname_names_its_only_host() -> None:
    """An unlabelled host's id ends in 8 characters of its boot id; where two have one hostname nobody is guessed."""
    status = {"hosts": [{"host": name} for name in ("gpu-1-0a1b2c3d", "gpu-2-00000000", "gpu-2-11111111", "gpu-1-b")]}
    assert check_host(status, "gpu-1") == "gpu-1-0a1b2c3d"
    assert check_host(status, "gpu-1-b") == "gpu-1-b"
    for unclear in ("gpu-2", "gpu", "gpu.1"):
        with pytest.raises(ConfigError, match=rf"no host '{unclear}'.*memstore status"):
            check_host(status, unclear)
