"""Singular values of attention maps: how fast they decay, and whether slow heads are harder to approximate.

The SMYRF supplement (§11, Figures 5 and 6) finds that the singular values of most heads' maps, after softmax, decay
exponentially, and that the heads where they do not are harder to approximate. This measures both on any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.analysis.maps import HeadMap, call_maps
from coterie.call import Call
from coterie.checks import expect, expect_choice, expect_int, expect_seed, expect_type
from coterie.hosts import host_of, watch_dense
from coterie.mechanisms import Full, Mechanism, as_mechanism
from coterie.observe import Seen
from coterie.progress import Progress, telling
from coterie.tables import facts, output, paragraph

DENSE_UP_TO = 2048  # the shorter side of a map whose singular values are all computed
LARGEST = 64  # values that are looked for in a larger one
SLOW = math.log(100)  # a slow head: over as many values as it has, its line falls by less than a hundredfold
ERRORS = ("output", "map", "frobenius")
MEASURES = ("effective_rank", "stable_rank", "rate", "r2")
_ITERATIONS, _TOLERANCE = 20, 1e-4
_FEW_HEADS = 6  # up to which p is by all orders of them
_COLUMNS = 1 << 24  # weights of a mechanism that are there at the same time


@dataclass(frozen=True, eq=False)
class HeadSpectrum:
    """The singular values σ₁ ≥ σ₂ ≥ … of one head's map A, after softmax.

    Attributes:
        module, sample, head: where the head is.
        shape: real queries × real keys; n, the length of the whole spectrum, is the smaller of the two.
        values: float64, descending: all n, or the largest.
        energy: ‖A‖²_F = Σ σᵢ², of all values, also of those that are not listed.
        rate, r2: the least-squares line log σᵢ ≈ c − rate·i through the listed values of the larger half, i ≤ ⌈n/2⌉,
            that are above rounding, and the share of their variance that it explains; NaN if there are fewer than
            three. The smallest values of nearly every map plunge, which says nothing about how it decays before.
        slow: rate·n is below the threshold: over n values the line falls by less than that factor.
        error: of the head under a mechanism, see `spectra`; NaN without one.
        change: largest relative change of a value in the last iteration of the randomised SVD; 0 for a dense one.
    """

    module: str
    sample: int
    head: int
    shape: tuple[int, int]
    values: Tensor
    energy: float
    rate: float
    r2: float
    slow: bool
    error: float = math.nan
    change: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all singular values are listed."""
        return len(self.values) == min(self.shape)

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of σᵢ / Σσ (Roy and Vetterli, 2007): 1 if one value holds everything, n if all are equal.

        NaN if not all values are listed; `stable_rank` is always known.
        """
        from scipy.stats import entropy

        if not self.complete:
            return math.nan
        return math.exp(float(entropy(self.values.cpu().numpy()))) if self.energy > 0 else 0.0

    @property
    def stable_rank(self) -> float:
        """‖A‖²_F / σ₁², at most the rank."""
        return self.energy / float(self.values[0]) ** 2 if self.energy > 0 else 0.0

    @property
    def rank_90(self) -> int | None:
        """How many values hold 90 % of the energy."""
        return self.rank_holding(0.9)

    @property
    def rank_99(self) -> int | None:
        """How many values hold 99 % of the energy."""
        return self.rank_holding(0.99)

    def rank_holding(self, share: float) -> int | None:
        """How many of the largest values hold this share of the energy; None if more than are listed."""
        expect(0 < share < 1, "share", "a number between 0 and 1", share)
        held = self.values.square().cumsum(0)
        count = int((held < share * self.energy).sum()) + 1
        return count if count <= len(held) else None


class Correlation(NamedTuple):
    """Spearman's rank correlation between a measure of the spectrum and the error."""

    measure: str
    rho: float
    p_value: float
    heads: int


@dataclass(frozen=True, eq=False)
class Spectra:
    """The spectra of all heads of a model on one input.

    Attributes:
        mechanism: whose error was measured; "" for none.
        error_of: "output", "map" or "frobenius", see `spectra`.
        heads: in the order in which the modules ran.
        skipped: attention modules that have no dense map of their own, such as sliding windows.
    """

    mechanism: str
    heads: tuple[HeadSpectrum, ...]
    skipped: tuple[str, ...] = ()
    error_of: str = "output"

    @property
    def slow(self) -> tuple[HeadSpectrum, ...]:
        """The heads that decay slowly."""
        return tuple(each for each in self.heads if each.slow)

    @property
    def errors_differ(self) -> bool:
        """Whether there are errors to correlate anything with: of at least 3 heads, and not all alike."""
        return bool(self.mechanism) and len(self.heads) >= 3 and len({each.error for each in self.heads}) > 1

    def correlation(self, measure: str = "effective_rank") -> Correlation:
        """Whether heads with a larger measure have a larger error.

        The supplement's claim, that slow heads are harder, predicts rho > 0 for the ranks and rho < 0 for the rate.

        Args:
            measure: "effective_rank", "stable_rank", "rate" or "r2".
        """
        from scipy.stats import permutation_test, spearmanr

        expect_choice("measure", measure, MEASURES)
        expect(self.mechanism != "", "mechanism", "one whose error was measured: spectra(…, mechanism=…)", "none")
        pairs = [(getattr(each, measure), each.error) for each in self.heads]
        known = all(math.isfinite(x) for x, _ in pairs)
        instead = "heads with all singular values (values=None, a larger dense_up_to), or 'stable_rank'"
        expect(known, "measure", instead, f"{measure!r}, which some heads do not have")
        varied = len({x for x, _ in pairs}) > 1 and len({y for _, y in pairs}) > 1
        expect(len(pairs) >= 3 and varied, "heads", "at least 3, not all alike", len(pairs))
        first, second = zip(*pairs, strict=True)
        found = spearmanr(first, second)
        chance = float(found.pvalue)
        if len(pairs) <= _FEW_HEADS:  # the formula is for many: all orders are counted

            def rho(some: Any) -> float:
                return float(spearmanr(some, second).statistic)

            chance = float(permutation_test((first,), rho, permutation_type="pairings", n_resamples=math.inf).pvalue)
        return Correlation(measure, float(found.statistic), chance, len(pairs))

    def table(self) -> list[dict[str, Any]]:
        """One row for each head, for a data frame or JSON."""
        return [
            {
                "module": each.module,
                "sample": each.sample,
                "head": each.head,
                "queries": each.shape[0],
                "keys": each.shape[1],
                "effective_rank": each.effective_rank,
                "stable_rank": each.stable_rank,
                "rank_90": each.rank_90,
                "rank_99": each.rank_99,
                "rate": each.rate,
                "r2": each.r2,
                "slow": each.slow,
                "error": each.error,
            }
            for each in self.heads
        ]

    def describe(self) -> str:
        """A few lines: how the heads decay, and whether the slow ones are harder."""
        return "\n".join([self._title(), *(f"  {name}: {said}" for name, said in self._facts())])

    def _repr_html_(self) -> str:
        """What a notebook shows: what `describe` says."""
        return output(paragraph(self._title()), facts(self._facts()).html())

    def _title(self) -> str:
        return f"spectra: {len(self.heads)} heads, {len(self.slow)} decay slowly"

    def _facts(self) -> list[tuple[str, str]]:
        """Ranks, the fit, errors and their correlations, each by name."""
        slow, fast = self.slow, [each for each in self.heads if not each.slow]
        ranks = torch.tensor([each.effective_rank for each in self.heads])
        lines = []
        if not ranks.isnan().any():
            lines.append(("effective rank", f"median {ranks.median():.1f}, {ranks.min():.1f}–{ranks.max():.1f}"))
        r2 = torch.tensor([each.r2 for each in self.heads])
        lines.append(("exponential fit", f"median R² {r2.nanmedian():.3f}"))
        error = f"{self.error_of} error of {self.mechanism}"
        if self.mechanism and slow and fast:
            means = [sum(each.error for each in part) / len(part) for part in (slow, fast)]
            lines.append((error, f"slow heads {means[0]:.3f}, others {means[1]:.3f}"))
        if self.mechanism and not self.errors_differ:
            lines.append((error, "the same in all heads, so nothing to compare"))
        elif self.mechanism:
            for measure in MEASURES if not ranks.isnan().any() else MEASURES[1:]:
                found = self.correlation(measure)
                lines.append((f"Spearman of {measure} and error", f"{found.rho:+.3f} (p = {found.p_value:.1e})"))
        if self.skipped:
            lines.append(("no dense map", ", ".join(self.skipped)))
        return lines


def spectra(
    model: Any,
    batch: Any,
    *,
    mechanism: Any = "smyrf",
    error_of: str = "output",
    values: int | None = None,
    dense_up_to: int = DENSE_UP_TO,
    slow_below: float = SLOW,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
    progress: Progress | bool | None = None,
) -> Spectra:
    """The spectra of every head of a model on one batch, and the error of a mechanism in the same heads.

    The model runs densely, once; a module that runs more than once (shared layers) is looked at the first time.

    Args:
        model: of Hugging Face, or with torch.nn.MultiheadAttention inside.
        batch: what the model is called with.
        mechanism: whose error is compared; None for none.
        error_of: "output": ‖out − exact‖ / ‖exact‖ of a head's output; "map": ‖Â − A‖_F / ‖A‖_F of its weights;
            "frobenius": ‖Â − A‖_F, which is what the supplement speaks of (§16.1). It matters: a slow head has a large
            ‖A‖_F, so that its error may be large in itself and small for its size.
        values, dense_up_to, slow_below, seed: as in `head_spectra`.
        tell: is told the name of each module when it is done.
        progress: as in `coterie.fit`.

    Example:
        >>> import torch
        >>> from coterie.analysis.spectra import spectra
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        >>> found = spectra(layer, torch.randn(1, 40, 32), mechanism="smyrf:rounds=2,cluster_size=10")
        >>> len(found.heads), found.heads[0].values.shape, found.correlation("stable_rank").heads
        (4, torch.Size([40]), 4)
    """
    chosen = None if mechanism is None else as_mechanism(mechanism)
    expect_choice("error_of", error_of, ERRORS)
    _check_settings(values, dense_up_to, slow_below, seed)
    bars, total = telling(progress), len(host_of(model).names)
    heads: list[HeadSpectrum] = []
    done: list[str] = []

    def look(name: str, seen: Seen) -> None:
        errors = None if chosen is None else _errors(seen, chosen, error_of)
        for each in _of_call(seen.call, name, values, dense_up_to, slow_below, seed):
            heads.append(each if errors is None else replace(each, error=float(errors[each.sample, each.head])))
        if tell is not None:
            tell(name)
        done.append(name)
        count("spectra", len(done), max(total, len(done)))

    with bars as count:
        skipped = watch_dense(model, batch, look)
    windows = f"; windows: {', '.join(skipped)}" if skipped else ""
    expect(bool(heads), "model", "dense attention over more than a few queries", "none" + windows)
    return Spectra("" if chosen is None else str(chosen), tuple(heads), skipped, error_of)


def head_spectra(
    q: Tensor,
    k: Tensor,
    *,
    values: int | None = None,
    dense_up_to: int = DENSE_UP_TO,
    slow_below: float = SLOW,
    seed: int = 0,
    module: str = "",
    attn_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
) -> tuple[HeadSpectrum, ...]:
    """The singular values of softmax(scale·q·kᵀ) of every head of every sample, in float64.

    A map whose shorter side is at most `dense_up_to` is held, one at a time, and decomposed exactly. Of a larger one,
    randomised subspace iteration (Halko, Martinsson and Tropp, 2011) finds the largest values, and the N × N map is
    never there: blocks of rows are recomputed from q and k for each product.

    Args:
        q, k: (B, H, Nq, D), (B, Hk, Nk, D).
        values: how many of the largest; None: all in a small map, 64 in a large one. A number of values much smaller
            than the map is always found by iteration.
        dense_up_to: see above.
        slow_below: a head is slow if rate·n is smaller. The default, log 100, is ours: the paper names none.
        seed: of the iteration's first subspace.
        module: a name to write into the results.
        attn_mask, key_mask, query_mask, is_causal, causal_offset, scale: as in `coterie.attention`.

    Example:
        >>> import torch
        >>> from coterie.analysis.spectra import head_spectra
        >>> q = k = torch.zeros(1, 1, 9, 4)                     # everybody attends to everybody alike: rank 1
        >>> found, = head_spectra(q, k)
        >>> round(found.effective_rank, 6), found.rank_99
        (1.0, 1)
    """
    _check_settings(values, dense_up_to, slow_below, seed)
    masks: dict[str, Any] = {"attn_mask": attn_mask, "key_mask": key_mask, "query_mask": query_mask}
    call = Call.of(q, k, **masks, is_causal=is_causal, causal_offset=causal_offset, scale=scale, runs=False)
    return _of_call(call, module, values, dense_up_to, slow_below, seed)


@torch.no_grad()
def _of_call(
    call: Call, module: str, values: int | None, dense_up_to: int, slow_below: float, seed: int
) -> tuple[HeadSpectrum, ...]:
    return tuple(_spectrum(each, module, values, dense_up_to, slow_below, seed) for each in call_maps(call))


def _check_settings(values: int | None, dense_up_to: int, slow_below: float, seed: int) -> None:
    if values is not None:
        expect_int("values", values, at_least=1)
    expect_int("dense_up_to", dense_up_to, at_least=0)
    expect_seed(seed)
    number = isinstance(slow_below, int | float) and not isinstance(slow_below, bool)
    expect_type(number, "slow_below", "a number", type(slow_below).__name__)
    expect(slow_below >= 0, "slow_below", "a number ≥ 0", slow_below)


def _spectrum(
    each: HeadMap, module: str, values: int | None, dense_up_to: int, slow_below: float, seed: int
) -> HeadSpectrum:
    full = min(each.shape)
    wanted = min(full, values or (full if full <= dense_up_to else LARGEST))
    if _width(wanted) < full:
        found, change = largest_values(each, wanted, seed=seed)
        energy = each.energy()
    else:
        found, change = torch.linalg.svdvals(each.dense()), 0.0
        energy = float(found.square().sum())
    found = found[:wanted]
    rate, r2 = decay(found[: (full + 1) // 2], largest_side=max(each.shape))
    return HeadSpectrum(
        module=module,
        sample=each.sample,
        head=each.head,
        shape=each.shape,
        values=found,
        energy=energy,
        rate=rate,
        r2=r2,
        slow=rate * full < slow_below,  # no fit, no flag: NaN is smaller than nothing
        change=change,
    )


def _width(values: int) -> int:
    """Columns of the iterated subspace: generous oversampling, since recomputing the map costs more than columns."""
    return values + max(10, values // 2)


def largest_values(each: HeadMap, values: int, *, seed: int = 0) -> tuple[Tensor, float]:
    """The largest singular values of a map that is never held, and by how much they last changed.

    Subspace iteration: the columns of X are multiplied by A and Aᵀ in turn and made orthonormal in between, until no
    value changes by more than 1e-4 of itself, or 20 times. SciPy's and scikit-learn's solvers want either an array or
    one vector at a time, for each of which the whole map would be recomputed.

    Example:
        >>> import torch
        >>> from coterie.analysis.maps import head_maps
        >>> from coterie.analysis.spectra import largest_values
        >>> one = next(head_maps(*torch.randn(2, 1, 1, 301, 8).unbind(0)))
        >>> found, change = largest_values(one, 3)
        >>> torch.allclose(found, torch.linalg.svdvals(one.dense())[:3], rtol=1e-3), change < 1e-4
        (True, True)
    """
    width = min(_width(values), *each.shape)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(each.shape[1], width, generator=generator, dtype=torch.float64).to(each.call.q.device)
    right = torch.linalg.qr(x).Q
    found, change = right.new_zeros(values), math.inf
    for _ in range(_ITERATIONS):
        left, small = torch.linalg.qr(each.times(right))
        before, found = found, torch.linalg.svdvals(small)[:values]
        floor = (1e-12 * found[0]).clamp(min=1e-300)  # what is smaller is rounding, and never settles
        change = float(((found - before).abs() / found.clamp(min=floor)).max())
        if change <= _TOLERANCE:
            break
        right = torch.linalg.qr(each.transposed_times(left)).Q
    return found, change


def decay(values: Tensor, *, largest_side: int) -> tuple[float, float]:
    """Rate and R² of the line log σᵢ ≈ c − rate·i through the values above rounding; NaN for fewer than three.

    What is below ε·largest_side·σ₁ is rounding, as in `numpy.linalg.matrix_rank`.

    Example:
        >>> import torch
        >>> from coterie.analysis.spectra import decay
        >>> rate, r2 = decay(torch.exp(-0.5 * torch.arange(20, dtype=torch.float64)), largest_side=20)
        >>> round(rate, 9), round(r2, 9)
        (0.5, 1.0)
    """
    from scipy.stats import linregress

    floor = torch.finfo(torch.float64).eps * largest_side * float(values[0])
    kept = values[values > floor].cpu().numpy()
    if len(kept) < 3:
        return math.nan, math.nan
    fit = linregress(range(len(kept)), [math.log(x) for x in kept])
    return -float(fit.slope), float(fit.rvalue) ** 2


def _errors(seen: Seen, mechanism: Mechanism, error_of: str) -> Tensor:
    """(B, heads): the error of a mechanism in one call."""
    wrong = size = torch.zeros(())
    for values in [seen.v] if error_of == "output" else _unit_columns(seen):
        call = replace(seen, call=replace(seen.call, v=values))
        exact = call.attend(Full()).double()
        wrong = wrong + (call.attend(mechanism).double() - exact).square().sum((2, 3))
        size = size + exact.square().sum((2, 3))
    return wrong.sqrt() if error_of == "frobenius" else (wrong / size.clamp(min=1e-300)).sqrt()


def _unit_columns(seen: Seen) -> Iterator[Tensor]:
    """The identity in the place of v, some columns at a time: attention's output is then the map itself."""
    batch, heads, keys = seen.k.shape[:3]
    step = max(1, _COLUMNS // max(1, batch * seen.q.shape[1] * max(keys, seen.q.shape[2])))
    for columns in torch.arange(keys, device=seen.v.device).split(step):
        unit = (torch.arange(keys, device=seen.v.device)[:, None] == columns).to(seen.v.dtype)
        yield unit.expand(batch, heads, keys, len(columns))
