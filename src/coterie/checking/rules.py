"""The rules in the order in which they are run, and how to keep each. A rule yields what it finds wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coterie.checking.answers import compiles, gradients, heads, native_plans
from coterie.checking.isolation import causality, isolation, padding
from coterie.checking.plans import lengths, runs, shapes, valid
from coterie.checking.repeats import determinism, layers, text
from coterie.checking.subject import Subject

RULES: dict[str, tuple[Callable[[Subject], Iterator[str]], str]] = {
    "runs": (runs, "`build` returns tokens.plan(rounds), which fills in sizes, offsets and causality."),
    "lengths": (
        lengths,
        "make tensors for the sizes that came, none included; clamp counts instead of assuming that there are enough.",
    ),
    "valid": (
        valid,
        "what each tensor of a plan may hold is written in Plan, Round and Means; no bias is +inf.",
    ),
    "shapes": (
        shapes,
        "make tensors as large as the input could need and leave slots unused; nonzero(), unique() and a mask as an "
        "index give shapes that depend on data.",
    ),
    "padding": (
        padding,
        "put real tokens alone into groups, means and answers (tokens.real_queries and tokens.real_keys list them), "
        "count from the first real one, and draw nothing by the length or by the place in the batch.",
    ),
    "isolation": (
        isolation,
        "sum and sort within a sample, never over the batch; plan from tokens.q and tokens.k, which are copies that "
        "hold 0 for padding, not from tokens.raw_q and tokens.raw_k; per_query is for mechanisms that look at each "
        "query alone.",
    ),
    "causality": (
        causality,
        "make the plan with tokens.plan(), which hides the future from real rows; a mean sits at its last member; "
        '"strict" needs groups that are made from earlier tokens alone; otherwise declare "mask" or "none".',
    ),
    "determinism": (
        determinism,
        "draw from a field `seed` and tokens.layer with a torch.Generator of your own, not from torch's.",
    ),
    "layers": (layers, "layer is any int in [0, 2^24), a field `seed` any int in [0, 2^63)."),
    "heads": (
        heads,
        "use tokens.k, which has a head of keys for each head of queries; means of keys are per key head.",
    ),
    "gradients": (
        gradients,
        "no gradient flows through a plan: a bias must not depend smoothly on q or k, and must not be +inf.",
    ),
    "text": (
        text,
        "@coterie.register('name') above @dataclass(frozen=True), and fields that JSON knows: numbers, strings, bools.",
    ),
    "backends": (
        native_plans,
        "plan in float64 from tokens.q and tokens.k, or call steps of tokens.steps; do not branch on tokens.backend.",
    ),
    "compile": (compiles, "no .item(), bool(tensor), tolist() or shapes from data in `build`."),
}
