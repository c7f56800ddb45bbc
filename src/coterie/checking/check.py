"""check_mechanism(): the rules for mechanisms, run on one."""

from __future__ import annotations

import torch

from coterie.checking.report import Broken, Checked
from coterie.checking.rules import RULES
from coterie.checking.subject import RaisedError, Subject
from coterie.checks import check_flag
from coterie.functional import MechanismLike
from coterie.mechanisms import as_mechanism


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
    subject = Subject(as_mechanism(mechanism), positional)
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
            except RaisedError as error:
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
