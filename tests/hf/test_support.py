"""The documentation lists the families that are tested, and the refusal names them."""

from __future__ import annotations

from coterie.hf.sites import TESTED
from tests.hf.families import FAMILIES
from tests.hf.support import PAGE, PLACE, family_of, table


def test_the_families_that_are_named_are_those_that_are_tested():
    assert [family_of(name) for name in TESTED] == FAMILIES


def test_the_table_in_the_documentation_is_up_to_date():
    """`python -m tests.hf.support` writes it."""
    found = PLACE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == table()
