"""Plans never serve stale structure: random edits between calls, compared with the slow model.

After each edit every function is called on the object that was edited, whose plan is warm, and on a
copy that was built by hand and that nothing has ever looked at.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.edits import EDIT, REAL
from tests.laws.graphs import graphs
from tests.laws.programs import run, steps


@settings(max_examples=100)
@given(graphs(depth=2), st.lists(steps(EDIT), min_size=1, max_size=5))
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_L8_every_function_sees_every_edit_and_a_refused_one_changes_nothing(made, program):
    root, _ = made
    model.check(root)
    for step in program:
        before = model.canonical(root)
        if run(REAL, [step], (root,)):
            assert model.canonical(root) == before
        try:
            nnx.split(root)
        except ValueError as error:  # data was put into a static container, or into itself
            assert "static attribute" in str(error) or "contains itself" in str(error)
            return
        model.check(root)
