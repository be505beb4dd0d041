"""The protocol keeps its form: rules and clauses are numbered without gaps, each rule has a statement first."""

from __future__ import annotations

import pytest
from rulebook import PROTOCOL, rules

RULES_COUNT = 36  # numbers of rules stay: a rule that goes leaves a line that says so


def faults(text: str) -> list[str]:
    """Return what is wrong with the form of a protocol text."""
    found, wrong = rules(text), []
    order = sorted(found, key=lambda rule: int(rule[1:]))
    if order != [f"R{number}" for number in range(1, len(order) + 1)]:
        wrong.append(f"the rules are not numbered from R1 without gaps: {order}")
    for rule, passages in found.items():
        clauses = [passage.number for passage in passages if passage.is_clause]
        if clauses != [f"{rule}.{number}" for number in range(1, len(clauses) + 1)]:
            wrong.append(f"the clauses of {rule} are not numbered from {rule}.1 in order: {clauses}")
        if not passages or passages[0].is_clause:
            wrong.append(f"{rule} does not begin with its statement")
        if strays := [p.text for p in passages[1:] if not p.is_clause and not p.text.startswith("*Breaks when* ")]:
            wrong.append(f"{rule} has text that no citation can name: {strays}")
    return wrong


def test_the_protocol_is_numbered() -> None:
    """A reader finds a cited rule by its number."""
    text = PROTOCOL.read_text(encoding="utf-8")
    assert len(rules(text)) == RULES_COUNT
    assert faults(text) == []


GOOD = "### R1 One\n\nIt is so.\n\n- **R1.1** First.\n- **R1.2** Second.\n\n*Breaks when* it rains.\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD + "\n### R3 Three\n\nIt is.\n", "without gaps: ['R1', 'R3']"),
        (GOOD.replace("R1.2", "R1.3"), "in order: ['R1.1', 'R1.3']"),
        (GOOD.replace("R1.2", "R2.2"), "in order: ['R1.1', 'R2.2']"),
        (GOOD.replace("It is so.\n\n", ""), "does not begin with its statement"),
        (GOOD + "\nAnd so on.\n", "no citation can name: ['And so on.']"),
    ],
)
def test_a_fault_of_form_is_seen(text: str, fault: str) -> None:
    """Each kind of fault is named; the text without it has none."""
    assert faults(GOOD) == []
    (found,) = faults(text)
    assert fault in found


def test_a_number_that_stands_twice_is_refused() -> None:
    """A citation would not say which of the two it means."""
    with pytest.raises(ValueError, match="R1 stands twice"):
        rules(GOOD + GOOD)
