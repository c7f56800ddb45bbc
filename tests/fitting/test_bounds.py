"""Lower bounds: against SciPy, against the papers' formulas written out, and by simulation."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.fitting.bounds import (
    betting,
    documents_for_mean,
    documents_for_share,
    fewest,
    lower_bound,
    share_bound,
    student,
    t_quantile,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 99, 400])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.99, 0.999])
def test_quantiles_of_t_are_scipys(freedom, confidence):
    assert t_quantile(confidence, freedom) == pytest.approx(stats.t.ppf(confidence, freedom), rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.sampled_from([0.6, 0.9, 0.95]))
def test_students_bound_is_scipys_less_a_correction_for_skewness(scores, confidence):
    n, spread, t = len(scores), statistics.stdev(scores), stats.t.ppf(confidence, len(scores) - 1)
    low = statistics.fmean(scores) - t * stats.sem(scores)
    skew = 0.0 if spread < 1e-9 else -stats.moment(scores, 3) / spread**3  # towards low scores
    low -= spread / n * (1 + 2 * t**2) * max(0.0, skew) / 6 * (n**2 / ((n - 1) * (n - 2)) if n > 2 else 1)
    assert student(scores, confidence) == pytest.approx(low, abs=1e-5)


def test_a_symmetric_sample_is_not_corrected():
    assert student([0.9, 0.95, 1.0], 0.95) == pytest.approx(0.95 - stats.t.ppf(0.95, 2) * stats.sem([0.9, 0.95, 1.0]))
    assert student([0.9, 0.9, 0.9, 1.0], 0.95) == pytest.approx(  # a high one says nothing of low ones
        0.925 - stats.t.ppf(0.95, 3) * stats.sem([0.9, 0.9, 0.9, 1.0])
    )


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.sampled_from([0.8, 0.95]))
def test_shares_are_bounded_as_clopper_and_pearson_do(counts, confidence):
    documents, held = counts
    low = stats.binomtest(held, documents, alternative="greater").proportion_ci(confidence, method="exact").low
    assert share_bound(held, documents, confidence) == pytest.approx(low, abs=1e-9)


def test_how_many_documents_a_share_needs():
    assert documents_for_share(0.95, 0.95) == 59
    assert share_bound(59, 59, 0.95) >= 0.95 > share_bound(58, 58, 0.95)


def capital(scores, mean, confidence, low):
    """The highest logarithm of a gambler's capital, in a loop, from the paper's formula."""
    n, best, logs = len(scores), 0.0, 0.0
    for t in range(n):
        seen = scores[:t]
        means = [(0.5 + sum(seen[: i + 1])) / (i + 2) for i in range(t)]
        variance = (0.25 + sum((x - m) ** 2 for x, m in zip(seen, means, strict=True))) / (t + 1)
        stake = math.sqrt(2 * math.log(1 / (1 - confidence)) / (n * variance))
        logs += math.log(1 + min(stake, 0.9 / (mean - low)) * (scores[t] - mean))
        best = max(best, logs)
    return best


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=80))
def test_who_bets_against_the_bound_gets_rich_and_above_it_does_not(scores):
    bound = betting(scores, 0.95, -1.0)
    needed = math.log(20)
    if bound > -1 + 1e-6:
        assert capital(scores, bound - 1e-7, 0.95, -1.0) >= needed - 1e-4
    if bound < 1 - 1e-6:
        assert capital(scores, bound + 1e-7, 0.95, -1.0) <= needed + 1e-4


def test_no_bet_shows_a_target_with_fewer_documents():
    enough = fewest(0.95, 0.9, 0.0)
    assert betting([1.0] * enough, 0.95, 0.0) >= 0.9 - 1e-9
    assert betting([1.0] * (enough - 1), 0.95, 0.0) < 0.9


def test_which_bound_is_taken_depends_on_the_number_of_documents_alone():
    many = 2 * fewest(0.95, 0.5, 0.0)
    assert lower_bound([0.7] * many, 0.95, 0.5, 0.0).method == "betting"
    assert lower_bound([0.7] * (many - 1), 0.95, 0.5, 0.0).method == "t"
    assert lower_bound([0.7] * many, 0.95, 0.5, None).method == "t"  # nobody knows how bad a document can be


def test_a_single_document_says_nothing_and_no_number_neither():
    assert lower_bound([0.999], 0.95, 0.99, -1.0).value == -math.inf
    assert math.isnan(lower_bound([0.999, math.nan], 0.95, 0.99, -1.0).value)


def test_scores_above_one_make_up_for_nothing():
    assert lower_bound([1.5, 0.9, 1.1, 0.9], 0.95, 0.9, None) == lower_bound([1.0, 0.9, 1.0, 0.9], 0.95, 0.9, None)


def test_how_many_documents_a_mean_needs():
    scores = [0.985, 0.995, 0.989, 0.994]
    needed = documents_for_mean(scores, 0.95, 0.99)
    assert needed is not None
    margin, spread = statistics.fmean(scores) - 0.99, statistics.stdev(scores)
    for n in range(2, needed + 1):
        shown = margin * math.sqrt(n) >= stats.t.ppf(0.95, n - 1) * spread
        assert shown == (n >= needed)
    assert documents_for_mean([0.98, 0.985], 0.95, 0.99) is None  # more of them would not make it better
    assert documents_for_mean([0.98], 0.95, 0.99) is None
    assert documents_for_mean([0.995, 0.995], 0.95, 0.99) == 2


@pytest.mark.parametrize("bound", [lambda x: betting(x, 0.9, 0.0), lambda x: share_bound(int(sum(x)), len(x), 0.9)])
def test_bounds_that_assume_nothing_are_wrong_as_seldom_as_they_say(bound):
    draw = random.Random(0)
    wrong = sum(bound([float(draw.random() < 0.8) for _ in range(40)]) > 0.8 for _ in range(1000))
    assert wrong <= 100 + 3 * math.sqrt(90)


def test_scores_without_end_certify_nothing():
    assert lower_bound([0.99, -math.inf, 0.99], 0.95, 0.98, None).value == -math.inf
    assert math.isnan(lower_bound([0.99, math.inf, 0.99], 0.95, 0.98, None).value)


@pytest.mark.parametrize(("held", "documents"), [(550, 1100), (800, 2000), (1999, 2000), (2000, 2000)])
def test_shares_of_thousands_of_documents(held, documents):
    low = stats.beta.ppf(0.05, held, documents - held + 1)
    assert share_bound(held, documents, 0.95) == pytest.approx(low, rel=1e-6)
