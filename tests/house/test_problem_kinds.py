"""Each kind of problem is made by a real fault in a test that does its remedy, and has a row in the manual."""

from __future__ import annotations

import ast

import pytest
from repository import ROOT

from memstore.core.report.problems import KINDS

#: Kind -> the file below tests/ and the function that breaks something, finds the row, does what it says, sees it go.
PROVED = {
    "host_suspect": "unit/core/report/test_problem_remedies.py::test_a_silent_host_is_suspect_then_dead",
    "host_dead": "unit/core/report/test_problem_remedies.py::test_the_copies_of_a_dead_host_are_rebuilt",
    "host_drains": "unit/core/report/test_training.py::test_a_notice_that_is_over",
    "host_full": "unit/holder/test_full_folder.py::test_a_fact_without_room_waits",
    "holder_nice": "integration/client/test_holder_priority.py::test_a_holder_comes_forward",
    "over_limit": "unit/arena/test_capacity.py::test_rm_and_a_refused_first_put",
    "host_warning": "unit/holder/test_controller_session.py::test_a_helper_that_was_not_built",
    "descriptors": "unit/arena/test_descriptors.py::test_a_holder_without_descriptors",
    "files_removed": "integration/faults/test_faults_arena.py::test_removed_files_of_a_living_holder",
    "damage_found": "integration/faults/test_faults_damage.py::test_the_scrub_finds_damage_by_itself",
    "launch_waits": "unit/core/attempts/test_controller_attempts.py::test_a_launch_that_gathers",
    "not_whole": "unit/core/report/test_problem_remedies.py::test_a_step_that_is_nowhere_whole",
    "step_retired": "unit/core/report/test_problem_remedies.py::test_a_retired_step_is_lifted_by_verify",
    "few_copies": "unit/core/report/test_problem_remedies.py::test_a_job_with_too_few_hosts",
    "job_ended": "unit/core/report/test_training.py::test_a_job_that_an_exception_ended",
    "ranks_ended": "integration/cli/test_cli_training.py::test_a_killed_rank_stops_training",
    "ranks_unseen": "integration/cli/test_cli_training.py::test_a_killed_rank_stops_training",
    "rank_late": "unit/core/report/test_training.py::test_one_rank_that_puts_nothing",
    "training_quiet": "unit/core/report/test_training.py::test_a_training_that_hangs",
    "nothing_committed": "unit/core/report/test_training.py::test_ranks_that_put_different_steps",
    "steps_skipped": "integration/cli/test_cli_training.py::test_puts_that_come_faster",
    "replicas_differ": "integration/client/test_shared_shard_processes.py::test_equal_ranks_that_differ",
    "placement": "unit/core/report/test_training.py::test_copies_that_cannot_lie_far_apart",
    "durable_off": "unit/core/report/test_problem_remedies.py::test_a_job_without_durable_storage",
    "durable_failed": "unit/core/report/test_training.py::test_storage_that_fails_and_one_that_is_slow",
    "durable_missing": "unit/core/durable/test_controller_durable_looks.py::test_what_durable_storage_lost",
    "durable_abandoned": "unit/core/report/test_problem_remedies.py::test_writes_that_are_abandoned",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_its_test_and_its_row_in_the_manual(kind: str) -> None:
    """A test that looks for the kind itself, or by a helper of its module that does."""
    page = (ROOT / "docs/operate/troubleshooting.md").read_text(encoding="utf-8")
    assert f"| `{kind}` |" in page
    path, _, begins = PROVED[kind].partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    [test] = [node for name, node in functions.items() if name.startswith(begins)]
    called = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & functions.keys()
    looks = [test, *(functions[name] for name in called)]
    texts = [node.value for look in looks for node in ast.walk(look) if isinstance(node, ast.Constant)]
    assert kind in texts, f"{PROVED[kind]} does not look for it"


def test_a_kind_that_is_gone_keeps_no_test_here() -> None:
    """The table has the kinds that there are."""
    assert PROVED.keys() == set(KINDS)
