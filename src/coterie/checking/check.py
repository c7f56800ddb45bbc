"""check_mechanism(): the rules for mechanisms, run on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.backend import backends
from coterie.call import Sizes, check_flag
from coterie.engine.api import check_padding, check_plan
from coterie.functional import MechanismLike, attention
from coterie.mechanisms import AtLeast, Mechanism, as_mechanism
from coterie.plan import Plan

LENGTH = 150  # enough for several groups of most settings
LENGTHS = ((0, 0), (0, 5), (5, 0), (1, 1), (2, 2), (3, 3), (17, 17), (63, 63), (111, 111), (1, 63), (63, 1), (17, 111))
REAL = (LENGTH, 97, 40, 3, 1, 0)  # tokens of each sample in a padded batch


@dataclass(frozen=True)
class Broken:
    """A rule that a mechanism breaks.

    Attributes:
        rule: its name.
        what: what happened, and with which input.
        mend: how to keep it.
    """

    rule: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}\n    → {self.mend}"


@dataclass(frozen=True)
class Checked:
    """What `check_mechanism` found.

    Attributes:
        mechanism: in its short form.
        broken: the rules that it breaks, each once, by the first input that showed it.
        kept: names of the rules that it keeps.
        skipped: rules, or parts of one, that were not run, and why.
    """

    mechanism: str
    broken: tuple[Broken, ...]
    kept: tuple[str, ...]
    skipped: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken

    def raise_if_broken(self) -> None:
        """Raise AssertionError with everything that is broken."""
        if self.broken:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        total = len(self.broken) + len(self.kept)
        if self.ok:
            lines = [f"{self.mechanism} keeps all {total} rules that were run: {', '.join(self.kept)}"]
        else:
            lines = [f"{self.mechanism} breaks {len(self.broken)} of {total} rules"]
        lines += [f"  {each}" for each in self.broken]
        lines += [f"  not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join(lines)


def check_mechanism(mechanism: MechanismLike, *, compile: bool = False, positional: bool | None = None) -> Checked:
    """Run the rules that every mechanism must keep, and say which it breaks, by what input, and how to mend it.

    The rules, in the order in which they are run (see "Your own mechanism" in the documentation):

    - `runs`: an ordinary call makes a plan for its sizes; if not, nothing else is run;
    - `lengths`: any length, none included, and any two lengths together;
    - `valid`: plans pass `validate()` and give finite answers;
    - `shapes`: shapes of the plan's tensors follow from the input's shapes, not from data or masks;
    - `padding`: padded tokens are in no group; a sample gets the plan and the answer that it would get alone;
    - `isolation`: neither other samples nor what stands in the padding (NaN, inf) matter, nor other queries if it
      declares `per_query`; inputs stay as they are;
    - `causality`: as declared, "mask", "strict" or "none";
    - `determinism`: the same plan for the same input, whatever torch was seeded with, and no draw from torch's
      generator; with `resample`, the same plan for the same seed of torch;
    - `layers`: any layer, and any `seed` if it has one;
    - `heads`: shared key heads give what repeated ones give;
    - `gradients`: finite, and those of the function that is computed (no bias may depend smoothly on q or k);
    - `text`: a frozen dataclass that comes back from its string and from its JSON;
    - `backends`: the native backend makes the reference's plan;
    - `compile`: traced in one graph, with the same answer.

    Args:
        mechanism: an object, its string or its JSON form.
        compile: also run the last rule, which takes seconds and empties torch.compile's caches.
        positional: whether positions decide who meets whom, so that a hole in a sequence is a distance: then padding in
            the midst of a sequence is not compared with the sequence alone. By default this is found out: so it is if
            plans have a window, or do not depend on q and k.

    Example:
        >>> import coterie
        >>> found = coterie.check_mechanism("local:window=8")
        >>> found.ok, found.broken
        (True, ())
        >>> found.raise_if_broken()  # in a test of your own
    """
    check_flag("compile", compile)
    if positional is not None:
        check_flag("positional", positional)
    subject = _Subject(as_mechanism(mechanism), positional)
    rules = dict(RULES) if compile else {name: rule for name, rule in RULES.items() if name != "compile"}
    if not compile:
        subject.skipped["compile"] = "ask for it with compile=True"
    broken: list[Broken] = []
    kept: list[str] = []
    raised: set[str] = set()
    with torch.random.fork_rng(devices=[]):
        for name, (rule, mend) in rules.items():
            try:
                what = next(rule(subject), None)
            except _RaisedError as error:
                if str(error.__cause__) in raised:
                    subject.skipped[name] = "stopped by an error that another rule reports"
                    continue
                raised.add(str(error.__cause__))
                what = str(error)
            if what is not None:
                broken.append(Broken(name, what, mend))
            elif not subject.skipped.get(name):
                kept.append(name)
            if name == "runs" and broken:
                subject.skipped = {"all others": "an ordinary call does not work"}
                break
    return Checked(str(subject.whole), tuple(broken), tuple(kept), subject.skipped)


class _RaisedError(Exception):
    """A call that should have worked raised the error that is this one's cause."""


class _Subject:
    """The mechanism under test, and what is known of it."""

    def __init__(self, mechanism: Mechanism, positional: bool | None) -> None:
        self.whole = mechanism
        self.mechanism = mechanism.inner if isinstance(mechanism, AtLeast) else mechanism  # the inputs here are short
        self._positional = positional
        self.skipped: dict[str, str] = {}

    @property
    def level(self) -> str:
        """The declared causality of these settings."""
        return self.mechanism.causality

    @property
    def ways(self) -> tuple[dict[str, Any], ...]:
        """Without and with causality, if there is any."""
        return ({},) if self.level == "none" else ({}, {"is_causal": True})

    @property
    def resample(self) -> bool:
        return bool(getattr(self.mechanism, "resample", False))

    def positional(self) -> bool:
        if self._positional is None:
            plans = [self.plan(*_draw(1, 2, LENGTH, seed=seed)[:2]) for seed in (1, 2)]
            windowed = any(each.window is not None for plan in plans for each in plan.rounds)
            self._positional = windowed or torch.equal(*(plan.to_dense() for plan in plans))
        return self._positional

    def plan(self, q: Tensor, k: Tensor, *, mechanism: Mechanism | None = None, **settings: Any) -> Plan:
        if self.resample:
            torch.manual_seed(0)  # it draws from torch's generator by design
        settings = {"backend": "reference", **settings}
        return _working(_case(q, k, settings), (mechanism or self.mechanism).plan, q, k, **settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        if self.resample:
            torch.manual_seed(0)
        settings = {"backend": "reference", "enable_gqa": q.shape[1] != k.shape[1], **settings}
        if "plan" in settings:
            settings["is_causal"] = settings["plan"].causal  # if that is not what was asked for, `causality` says so
        run = settings.pop("run", attention)
        out: Tensor = _working(_case(q, k, settings), run, q, k, v, self.mechanism, **settings)
        return out


def _working(case: str, run: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """What a call gives; whatever it raises is a finding, not ours to handle."""
    try:
        return run(*args, **settings)
    except Exception as error:
        raise _RaisedError(f"{case} raised {type(error).__name__}: {error}") from error


def _case(q: Tensor, k: Tensor, settings: dict[str, Any]) -> str:
    words = [f"{q.shape[2]} queries and {k.shape[2]} keys"]
    words += ["with padding"] if settings.get("key_mask") is not None else []
    words += ["causal"] if settings.get("is_causal") else []
    words += [f"layer {settings['layer']}"] if "layer" in settings else []
    words += [f"{q.shape[1]} heads on {k.shape[1]}"] if q.shape[1] != k.shape[1] else []
    return ", ".join(words)


def _draw(
    batch: int, heads: int, queries: int, keys: int | None = None, *, key_heads: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = ((heads, queries), (key_heads or heads, keys), (key_heads or heads, keys))
    q, k, v = (torch.randn(batch, *shape, 8, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def _padding(real: tuple[int, ...], length: int, side: str) -> Tensor:
    """(B, length) masks with so many real tokens, the padding on one side or in their midst."""
    place = torch.arange(length).expand(len(real), -1)
    counts = torch.tensor(real)[:, None]
    if side == "left":
        return place >= length - counts
    if side == "right":
        return place < counts
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(length, generator=generator) < count for count in real])


def _same(found: Tensor, want: Tensor, tolerance: float = 1e-8) -> bool:
    return torch.allclose(found, want, rtol=tolerance, atol=tolerance)


def _equal(one: Plan, other: Plan) -> bool:
    a, b = one.to_dict(), other.to_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- the rules: each yields what it finds wrong ----------------------------------------------------------------------


def _runs(subject: _Subject) -> Iterator[str]:
    q, k, _ = _draw(2, 2, LENGTH)
    plan = subject.plan(q, k)
    if not isinstance(plan, Plan):
        yield f"plan() gave {type(plan).__name__}, not a Plan"
        return
    sizes = Sizes(2, 2, 2, LENGTH, LENGTH)
    try:
        check_plan(plan, sizes, q.device)
    except ValueError as error:
        yield f"{LENGTH} queries and keys: {error}"
    if subject.level not in ("none", "mask", "strict"):
        yield f'causality is {subject.level!r}, not "none", "mask" or "strict"'


def _lengths(subject: _Subject) -> Iterator[str]:
    for settings in subject.ways:
        for queries, keys in LENGTHS:
            q, k, _ = _draw(2, 2, queries, keys)
            plan = subject.plan(q, k, **settings)
            if (plan.num_queries, plan.num_keys) != (queries, keys):
                yield f"{_case(q, k, settings)}: the plan is for {plan.num_queries} and {plan.num_keys}"


def _valid(subject: _Subject) -> Iterator[str]:
    for settings in subject.ways:
        for queries, keys in (*LENGTHS, (LENGTH, LENGTH)):
            q, k, v = _draw(2, 2, queries, keys)
            case = _case(q, k, settings)
            plan = subject.plan(q, k, **settings)
            _working(case, plan.validate)
            out = subject.attend(q, k, v, plan=plan, **settings)
            if not bool(out.isfinite().all()):
                yield f"{case}: the answer has inf or NaN, as a bias of the plan is +inf"


def _shapes(subject: _Subject) -> Iterator[str]:
    q, k, _ = _draw(3, 2, LENGTH)
    others: dict[str, tuple[tuple[Tensor, Tensor], dict[str, Any]]] = {
        "other data": ((5 * q.flip(2), k.roll(3, 2)), {}),
        "equal tokens": ((torch.zeros_like(q), torch.zeros_like(k)), {}),
        "a key_mask": ((q, k), {"key_mask": _padding((LENGTH, 20, 0), LENGTH, "right")}),
    }
    for settings in subject.ways:
        want = {name: tuple(x.shape) for name, x in subject.plan(q, k, **settings).to_dict().items()}
        for name, ((q2, k2), masks) in others.items():
            got = {name: tuple(x.shape) for name, x in subject.plan(q2, k2, **masks, **settings).to_dict().items()}
            for field in want.keys() | got.keys():
                if want.get(field) != got.get(field):
                    yield f"{field} has shape {want.get(field)} for some input and {got.get(field)} for {name}"


def _pads(subject: _Subject) -> Iterator[str]:
    for settings in subject.ways:
        for side in ("right", "left", "scattered"):
            mask = _padding(REAL, LENGTH, side)
            yield from _padded_batch(subject, mask, side, settings)
    yield from _padded_cross_attention(subject)


def _names_padding(plan: Plan, query_mask: Tensor, key_mask: Tensor) -> str | None:
    try:
        check_padding(plan, key_mask, query_mask)
    except ValueError as error:
        return f"a mean holds padded tokens ({error})"
    counts = plan.to_dense()
    if bool(counts.permute(0, 3, 1, 2)[~key_mask].any()):
        return "padded keys are in its groups"
    if bool(counts.transpose(1, 2)[~query_mask].any()):
        return "padded queries are in its groups, or borrow an answer"
    return None


def _padded_batch(subject: _Subject, mask: Tensor, side: str, settings: dict[str, Any]) -> Iterator[str]:
    q, k, v = _draw(len(REAL), 2, LENGTH)
    case = f"a batch padded to {LENGTH} ({side}{', causal' if settings else ''})"
    plan = subject.plan(q, k, key_mask=mask, **settings)
    if named := _names_padding(plan, mask, mask):
        yield f"{case}: {named}"
        return
    out, dense = subject.attend(q, k, v, key_mask=mask, plan=plan, **settings), plan.to_dense()
    for b, real in enumerate(mask):
        own = [x[b : b + 1, :, real] for x in (q, k, v)]
        alone = subject.plan(*own[:2], **settings)
        same_plan = torch.equal(dense[b][:, real][:, :, real], alone.to_dense()[0])
        if same_plan and _same(out[b, :, real], subject.attend(*own, plan=alone, **settings)[0]):
            continue
        if side == "scattered" and subject.positional():
            subject.skipped["padding in the midst of a sequence, against the sequence alone"] = "holes are distances"
            return
        what = "answer" if same_plan else "plan"
        yield f"{case}: the {what} of the sample with {int(real.sum())} tokens is not the one that it gets alone"


def _padded_cross_attention(subject: _Subject) -> Iterator[str]:
    queries, keys = (60, 11, 3), (33, 90, 1)
    q, k, v = _draw(3, 2, 60, 90)
    query_mask, key_mask = _padding(queries, 60, "left"), _padding(keys, 90, "right")
    settings: dict[str, Any] = {
        "query_mask": query_mask,
        "key_mask": key_mask,
        "causal_offset": torch.tensor(keys) - 60,
    }
    plan = subject.plan(q, k, **settings)
    if named := _names_padding(plan, query_mask, key_mask):
        yield f"cross-attention with padding: {named}"
        return
    out = subject.attend(q, k, v, plan=plan, **settings)
    for b in range(3):
        own = q[b : b + 1, :, query_mask[b]], k[b : b + 1, :, key_mask[b]], v[b : b + 1, :, key_mask[b]]
        if not _same(out[b, :, query_mask[b]], subject.attend(*own)[0]):
            alone = f"{queries[b]} queries and {keys[b]} keys"
            yield f"cross-attention with padding: the answer of {alone} is not the one that they get alone"


def _isolation(subject: _Subject) -> Iterator[str]:
    q, k, v = _draw(3, 2, LENGTH)
    before = q.clone(), k.clone()
    for settings in subject.ways:
        plan = subject.plan(q, k, **settings)
        if not (torch.equal(q, before[0]) and torch.equal(k, before[1])):
            yield "planning changes q or k in place"
            return
        changed = [x.clone() for x in (q, k)]
        for x in changed:
            x[1] = 50 * x[1].roll(3, 1)
        others = [0, 2]
        if not torch.equal(plan.to_dense()[others], subject.plan(*changed, **settings).to_dense()[others]):
            yield "the plan of one sample changes with another sample of the batch"
            return
        if subject.mechanism.per_query:
            half = torch.cat([q[:, :, : LENGTH // 2], 50 * q[:, :, LENGTH // 2 :].roll(3, 2)], 2)
            met = (each.to_dense()[:, :, : LENGTH // 2] for each in (plan, subject.plan(half, k, **settings)))
            if not torch.equal(*met):
                yield "it declares per_query, and whom a query meets changes with other queries"
                return
        mask = _padding((LENGTH, 97, 20), LENGTH, "right")
        settings = {**settings, "key_mask": mask}
        want, out = subject.plan(q, k, **settings), subject.attend(q, k, v, **settings)
        for wild in (float("nan"), float("inf"), 1e30):
            dirty = [torch.where(mask[:, None, :, None], x, wild) for x in (q, k, v)]
            same = torch.equal(want.to_dense(), subject.plan(*dirty[:2], **settings).to_dense())
            if not same or not torch.equal(out, subject.attend(*dirty, **settings)):
                yield f"{wild} in the padding changes {'the answer' if same else 'the plan'}"
                return


def _causality(subject: _Subject) -> Iterator[str]:
    q, k, v = _draw(1, 2, LENGTH)
    if subject.level == "none":
        try:
            subject.mechanism.plan(q, k, is_causal=True, backend="reference")
        except ValueError:
            return
        yield 'it declares "none" and does not refuse is_causal'
        return
    for queries in (LENGTH, 60):  # alone, and with a cache in front
        tail = q[:, :, LENGTH - queries :]
        plan = subject.plan(tail, k, is_causal=True)
        out = subject.attend(tail, k, v, is_causal=True)
        for cut in (LENGTH - queries + 1, LENGTH - queries // 2, LENGTH - 1):  # the first key that is changed
            earlier = cut - (LENGTH - queries)
            other = torch.where(torch.arange(LENGTH)[:, None] < cut, v, float("nan"))
            if not _same(subject.attend(tail, k, other, is_causal=True)[:, :, :earlier], out[:, :, :earlier]):
                yield f"values from key {cut} on reach queries before it ({_case(tail, k, {'is_causal': True})})"
                return
            if subject.level != "strict":
                continue
            late = torch.arange(LENGTH)[:, None] >= cut
            drawn = _draw(1, 2, LENGTH, seed=cut)
            q2, k2, v2 = (torch.where(late, 3 * y, x) for x, y in zip((q, k, v), drawn, strict=True))
            q2 = q2[:, :, LENGTH - queries :]
            after = subject.plan(q2, k2, is_causal=True)
            if not torch.equal(after.to_dense()[:, :, :earlier], plan.to_dense()[:, :, :earlier]):
                yield f'it declares "strict", and tokens from {cut} on change the plan of queries before them'
                return
            if not _same(subject.attend(q2, k2, v2, is_causal=True)[:, :, :earlier], out[:, :, :earlier]):
                yield f'it declares "strict", and tokens from {cut} on change the answers of queries before them'
                return


def _determinism(subject: _Subject) -> Iterator[str]:
    q, k, _ = _draw(2, 2, LENGTH)
    if subject.resample:
        if not _equal(subject.plan(q, k), subject.plan(q, k)):
            yield "with resample, the same seed of torch gives two plans"
        return
    torch.manual_seed(1)
    first = subject.plan(q, k)
    state = torch.random.get_rng_state()
    second = subject.plan(q, k)
    if not torch.equal(state, torch.random.get_rng_state()):
        yield "planning draws from torch's generator"
        return
    torch.manual_seed(2)
    if not (_equal(first, second) and _equal(first, subject.plan(q, k))):
        yield "the same input gives two plans"


def _layers(subject: _Subject) -> Iterator[str]:
    q, k, _ = _draw(1, 2, LENGTH)
    for layer in (1, 2**24 - 1):
        subject.plan(q, k, layer=layer)
    if not is_dataclass(subject.mechanism) or "seed" not in [f.name for f in fields(subject.mechanism)]:
        return
    for seed in (1, 2**63 - 1):
        reseeded = _working(f"seed {seed}", replace, subject.mechanism, seed=seed)
        plan = subject.plan(q, k, mechanism=reseeded)
        if not isinstance(plan, Plan):
            yield f"seed {seed}: plan() gave {type(plan).__name__}, not a Plan"


def _heads(subject: _Subject) -> Iterator[str]:
    q, k, v = _draw(1, 4, LENGTH, 111, key_heads=2)
    k2, v2 = (x.repeat_interleave(2, 1) for x in (k, v))
    for settings in subject.ways:
        if not _same(subject.attend(q, k, v, **settings), subject.attend(q, k2, v2, **settings)):
            yield "4 heads on 2 key heads do not give what they give on these repeated"


def _gradients(subject: _Subject) -> Iterator[str]:
    step = 1e-6
    for seed in range(3):
        inputs = _draw(1, 2, 63, seed=seed)
        toward = _draw(1, 2, 63, seed=seed + 10)
        weight = _draw(1, 2, 63, seed=20)[0]
        moved = [[x + sign * step * t for x, t in zip(inputs, toward, strict=True)] for sign in (-1, 1)]
        plans = [subject.plan(*x[:2]).to_dense() for x in (inputs, *moved)]
        if not (torch.equal(plans[0], plans[1]) and torch.equal(plans[0], plans[2])):
            continue  # on an edge between two plans there is no derivative
        leaves = [x.clone().requires_grad_() for x in inputs]
        grads = torch.autograd.grad((subject.attend(*leaves) * weight).sum(), leaves, allow_unused=True)
        grads = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))
        if not all(bool(g.isfinite().all()) for g in grads):
            yield "a gradient has inf or NaN"
            return
        slope = sum(float((g * t).sum()) for g, t in zip(grads, toward, strict=True))
        low, high = (float((subject.attend(*x) * weight).sum()) for x in moved)
        found = (high - low) / (2 * step)
        if abs(slope - found) > 1e-4 * max(1.0, abs(found)):
            yield f"the gradient's slope is {slope:.6g}, differences say {found:.6g}"
        return
    subject.skipped["gradients"] = "every point that was tried lies on an edge between two plans"


def _text(subject: _Subject) -> Iterator[str]:
    mechanism = subject.whole
    if not (is_dataclass(mechanism) and type(mechanism).__dataclass_params__.frozen):
        yield f"{type(mechanism).__name__} is not a frozen dataclass"
        return
    for form, text in (("string", str(mechanism)), ("JSON form", _working("to_json()", mechanism.to_json))):
        if not subject.mechanism.name:
            yield f"{type(subject.mechanism).__name__} has no name"
            return
        back = _working(f"its {form} {text!r}", as_mechanism, text)
        if back != mechanism:
            yield f"its {form} {text!r} is read as another mechanism, {back!r}"
            return


def _backends(subject: _Subject) -> Iterator[str]:
    state = backends()["native"]
    if not state.startswith("available"):
        subject.skipped["backends"] = state
        return
    for settings in subject.ways:
        for side in ("right", "left", ""):
            for queries, keys in ((LENGTH, LENGTH),) if side else ((LENGTH, LENGTH), (17, 111), (0, 5), (5, 0), (1, 1)):
                q, k, _ = (x.float() for x in _draw(3, 2, queries, keys))
                masks: dict[str, Any] = {"key_mask": _padding((LENGTH, 97, 3), LENGTH, side)} if side else {}
                native, reference = (
                    subject.plan(q, k, backend=backend, **masks, **settings) for backend in ("native", "reference")
                )
                if not torch.equal(native.to_dense(), reference.to_dense()):
                    yield f"{_case(q, k, {**masks, **settings})}: the native plan differs from the reference's"
                    return


def _compile(subject: _Subject) -> Iterator[str]:
    state = backends()["native"]
    if not state.startswith("available"):
        subject.skipped["compile"] = state
        return
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = (x.float() for x in _draw(2, 2, 63))
    for settings in ({}, {**subject.ways[-1], "key_mask": _padding((63, 20), 63, "right")}):
        settings = {**settings, "backend": "native"}
        out = subject.attend(q, k, v, run=compiled, **settings)
        if not _same(out, subject.attend(q, k, v, **settings), 1e-4):
            yield f"{_case(q, k, settings)}: the compiled graph gives another answer"


RULES: dict[str, tuple[Callable[[_Subject], Iterator[str]], str]] = {
    "runs": (_runs, "`build` returns tokens.plan(rounds), which fills in sizes, offsets and causality."),
    "lengths": (
        _lengths,
        "make tensors for the sizes that came, none included; clamp counts instead of assuming that there are enough.",
    ),
    "valid": (
        _valid,
        "what each tensor of a plan may hold is written in Plan, Round and Means; no bias is +inf.",
    ),
    "shapes": (
        _shapes,
        "make tensors as large as the input could need and leave slots unused; nonzero(), unique() and a mask as an "
        "index give shapes that depend on data.",
    ),
    "padding": (
        _pads,
        "put real tokens alone into groups, means and answers (tokens.real_queries and tokens.real_keys list them), "
        "count from the first real one, and draw nothing by the length or by the place in the batch.",
    ),
    "isolation": (
        _isolation,
        "sum and sort within a sample, never over the batch; plan from tokens.q and tokens.k, which are copies that "
        "hold 0 for padding, not from tokens.raw_q and tokens.raw_k; per_query is for mechanisms that look at each "
        "query alone.",
    ),
    "causality": (
        _causality,
        "make the plan with tokens.plan(), which hides the future from real rows; a mean sits at its last member; "
        '"strict" needs groups that are made from earlier tokens alone; otherwise declare "mask" or "none".',
    ),
    "determinism": (
        _determinism,
        "draw from a field `seed` and tokens.layer with a torch.Generator of your own, not from torch's.",
    ),
    "layers": (_layers, "layer is any int in [0, 2^24), a field `seed` any int in [0, 2^63)."),
    "heads": (
        _heads,
        "use tokens.k, which has a head of keys for each head of queries; means of keys are per key head.",
    ),
    "gradients": (
        _gradients,
        "no gradient flows through a plan: a bias must not depend smoothly on q or k, and must not be +inf.",
    ),
    "text": (
        _text,
        "@coterie.register('name') above @dataclass(frozen=True), and fields that JSON knows: numbers, strings, bools.",
    ),
    "backends": (
        _backends,
        "plan in float64 from tokens.q and tokens.k, or call steps of tokens.steps; do not branch on tokens.backend.",
    ),
    "compile": (_compile, "no .item(), bool(tensor), tolist() or shapes from data in `build`."),
}
