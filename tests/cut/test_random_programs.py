"""Small programs drawn at random and cut at random: equal to eager bit for bit, or refused; never silently different."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cut.random_programs import BREAK_AT, KINDS, OPTIONS, Plan, drawn_plan, judged

operations = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7))
plans = st.builds(
    Plan,
    st.lists(operations, min_size=2, max_size=10).map(tuple),
    st.sampled_from(BREAK_AT),
    st.sampled_from(OPTIONS),
)
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@settings(common, max_examples=30, derandomize=True)
@given(plans)
def test_equal_or_refused(plan: Plan) -> None:
    judged(plan)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(8))
def test_six_hundred_more(batch: int) -> None:
    """By seed, so that a long search can be told which it has seen. A third of them at least must prove something."""
    seen = Counter(judged(drawn_plan(seed)).split(":")[0] for seed in range(75 * batch, 75 * (batch + 1)))
    assert seen["equal"] >= 25, str(seen)


@pytest.mark.slow
@settings(common, max_examples=300, derandomize=False)
@given(plans)
def test_other_programs_each_time(plan: Plan) -> None:
    judged(plan)
