"""torch's own distributed-checkpoint cases that need no accelerator, on four ranks (memstore/client/dcp/CASES.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from repository import ROOT, SUPPORT

from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.ranks.dcp_ranks import DcpFleet, run
from memstore.testing.ranks.rank_process import RankNursery, RankProcess

PROGRAM = SUPPORT.joinpath("dcp_cases.py")
TABLE = ROOT / "memstore" / "client" / "dcp" / "CASES.md"
HOSTS = ("h1", "h2", "h3", "h4")
CASES = [
    node.name
    for node in ast.parse(PROGRAM.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and [argument.arg for argument in node.args.args] == ["case"]
]


class Launch:
    """Four ranks that all cases share, launched again after a case that failed."""

    def __init__(self, fleet: DcpFleet) -> None:
        self.fleet = fleet
        self.ranks: list[RankProcess] = []
        self.step = 0

    def run(self, name: str) -> None:
        if not self.ranks:
            self.fleet.job, self.step = f"of-{name.replace('_', '-')}", 0
            self.ranks = self.fleet.launch(HOSTS)
            # In any order: a state that has outgrown its share costs a step, and the cases' states differ (R10).
            self.step = run(self.ranks, "claim_room")[0]["step"]
        ranks, self.ranks = self.ranks, []
        try:
            replies = run(ranks, "run_case", case=name, step=self.step)
        except BaseException:
            self.fleet.kill(ranks)
            raise
        self.step, self.ranks = replies[0]["step"], ranks


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, dcp_nursery: RankNursery) -> Iterator[Launch]:
    folder = tmp_path_factory.mktemp("dcp")
    hosts: dict[str, dict[str, Any]] = {host: {} for host in HOSTS}
    with ProcessCluster(folder / "cluster", hosts) as cluster:
        yield Launch(DcpFleet(cluster, dcp_nursery, PROGRAM, folder, stall_budget_s=20.0))
        dcp_nursery.kill_all()


@pytest.mark.parametrize("name", CASES)
def test_case(launch: Launch, name: str) -> None:
    """The case holds on every rank."""
    launch.run(name)


def test_the_table_names_every_case_and_counts_right() -> None:
    """CASES.md says what is covered by which function here, and its totals are those of its rows."""
    text = TABLE.read_text(encoding="utf-8")
    table = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(row[3] + row[4] for row in table)))
    assert set(CASES) <= named | {"sharded_tensor_is_refused_by_async_save"}
    covered, total = (sum(int(row[i]) for row in table) for i in (1, 2))
    assert f"{covered} of {total}" in text
