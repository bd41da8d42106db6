"""Each mutation changes code that is there, and names a test file that is."""

from __future__ import annotations

import pytest

from tests.harness import ROOT
from tests.mutations.mutation import Mutation
from tests.mutations.tables import TABLES


@pytest.mark.parametrize("mutation", [row for rows in TABLES.values() for row in rows], ids=lambda row: row.promise)
def test_it_can_be_applied(mutation: Mutation) -> None:
    before = (ROOT / mutation.file).read_text()
    assert mutation.applied(before) != before
    assert (ROOT / mutation.test_file()).is_file()
