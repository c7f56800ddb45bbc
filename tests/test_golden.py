"""Plans, outputs and the public surface are what they were when `tests/golden.json` was written."""

from __future__ import annotations

import json

import pytest

from tests import golden
from tests.cases import MECHANISMS

STORED = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("backend", golden.BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_plans_and_outputs_are_unchanged(name, backend):
    for case in (case for case in golden.CASES if case.startswith(f"{name}/")):
        found, want = golden.fingerprint(case, backend), STORED["calls"][backend][case]
        sums, stored = found.pop("sums", []), want.pop("sums", [])
        assert found == want, case
        # Plans are the same everywhere; sums are rounded as the machine's instructions round.
        assert sums == pytest.approx(stored, rel=1e-4, abs=1e-3), case


@pytest.mark.parametrize("kind", ["names", "schemas", "mechanisms"])
def test_the_public_surface_is_unchanged(kind):
    found, want = golden.surface()[kind], STORED["surface"][kind]
    assert list(found) == list(want)
    for each in found if isinstance(found, dict) else range(len(found)):
        assert found[each] == want[each], each
