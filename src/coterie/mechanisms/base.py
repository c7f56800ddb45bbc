"""What every mechanism shares: its dataclass form, its registry, its string and JSON, and the public `plan()`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from coterie.call import Call, Planning, no_autocast, no_gradients
from coterie.checks import did_you_mean, expect, expect_choice, expect_type
from coterie.plan import Plan
from coterie.plan.guests import seat
from coterie.planning.tokens import Tokens
from coterie.tables import facts, output, paragraph

_REGISTRY: dict[str, type[Mechanism]] = {}
_FIELDS: dict[str, tuple[str, ...]] = {}  # of each, as a graph cannot be compiled through dataclasses.fields
_Class = TypeVar("_Class", bound="type[Mechanism]")


class Causality(StrEnum):
    """What a mechanism promises where the future is hidden; see the user guide."""

    NONE = "none"
    MASK = "mask"
    STRICT = "strict"


class StrictIfAsked:
    """The causality of a mechanism with a field `strict`: of an instance what it gives, of the class its default."""

    def __get__(self, mechanism: Any, cls: type) -> Causality:
        return Causality.STRICT if mechanism is not None and mechanism.strict else Causality.MASK

    def __str__(self) -> str:
        return "mask, or strict with strict=True"


class Mechanism(ABC):
    """Who meets whom. Subclass it as a frozen dataclass of hyper-parameters, name it, and write `build`:

    >>> from dataclasses import dataclass
    >>> import torch, coterie
    >>> @coterie.register("first-keys")
    ... @dataclass(frozen=True)
    ... class FirstKeys(coterie.Mechanism):
    ...     count: int = 8
    ...     def check(self):
    ...         if self.count < 1:
    ...             raise ValueError(f"count: expected an int ≥ 1, got {self.count}")
    ...     def build(self, tokens):
    ...         queries, num_queries = tokens.real_queries
    ...         keys, num_keys = tokens.real_keys
    ...         zero = torch.zeros_like(num_queries)
    ...         everyone = torch.stack([zero, num_queries], -1)
    ...         return tokens.plan((coterie.Round(
    ...             query_order=tokens.per_head(queries), query_offsets=tokens.per_head(everyone),
    ...             key_order=tokens.per_head(keys), key_start=tokens.per_head(zero[:, None]),
    ...             key_stop=tokens.per_head(num_keys.clamp(max=self.count)[:, None]),
    ...         ),))
    >>> q = torch.randn(1, 2, 100, 16)
    >>> coterie.attention(q, q, q, "first-keys:count=3").shape
    torch.Size([1, 2, 100, 16])

    Attributes:
        name: what strings and JSON call it; set by `register`.
        causality: "strict", "mask" or "none", see the user guide; "none" refuses `is_causal`.
        per_query: whom a query meets does not depend on the other queries.
        size_field: the field, a number, that grows with the keys that a query meets; None if there is none.
    """

    name: ClassVar[str] = ""
    causality: ClassVar[str] = Causality.MASK  # a subclass may write the plain word
    per_query: ClassVar[bool] = False
    size_field: ClassVar[str | None] = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        word = cls.__dict__.get("causality")
        if isinstance(word, str):
            expect_choice(f"{cls.__name__}.causality", word, tuple(level.value for level in Causality))
            cls.causality = Causality(word)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError or TypeError if a hyper-parameter is out of range."""
        return

    @abstractmethod
    def build(self, tokens: Tokens) -> Plan:
        """Write the plan. No gradient flows here."""

    def plan(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        guests: Tensor | None = None,
        is_causal: bool = False,
        causal_offset: int | Tensor | None = None,
        scale: float | None = None,
        layer: int = 0,
        backend: str = "auto",
    ) -> Plan:
        """Who meets whom for these queries (B, H, Nq, D) and keys (B, Hk, Nk, D).

        Args:
            q, k: queries and keys; values do not matter to a plan.
            key_mask, query_mask: (B, Nk) and (B, Nq) bool, True for real tokens; with Nq = Nk and only a key mask,
                it is taken for the queries too.
            guests: (B, Nq) bool: queries to be answered that must not matter to any other, as padding that a model
                reads. They take no part in the planning; each then joins the groups of the last real query before it,
                or of the first one.
            is_causal: query i meets only keys ≤ i + causal_offset.
            causal_offset: an int, or (B,) integers; Nk − Nq by default.
            scale: of the scores; 1/√D by default.
            layer: index of the layer, for the random draws.
            backend: as in `attention`; plans differ at most where two hashes or distances tie to rounding.
        """
        return self._plan(
            Call.of(
                q,
                k,
                key_mask=key_mask,
                query_mask=query_mask,
                guests=guests,
                is_causal=is_causal,
                causal_offset=causal_offset,
                scale=scale,
                layer=layer,
                backend=backend,
                runs=False,
            )
        )

    def _plan(self, call: Call) -> Plan:
        """The plan of a checked call; see `plan_call`."""
        if call.causal and self.causality == "none":
            self.refuse_causality()
        real, guests = call.real_queries, call.guests
        if guests is not None:
            guests = guests & ~real
        with no_gradients(), no_autocast(call.q.device):
            if guests is None:
                return self.build(Tokens(call, real, call.real_keys))
            if self.per_query:
                return self.build(Tokens(call, real | guests, call.real_keys, guests))
            tokens = Tokens(call, real, call.real_keys)
            return seat(self.build(tokens), real, guests, tokens.steps.group_by)

    def refuse_causality(self) -> NoReturn:
        """What is said where `causality` is "none"."""
        raise ValueError(
            f"is_causal: expected False for {self.name!r}, whose mean queries would mix the future in, got True"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the name and every field."""
        expect(is_dataclass(self), type(self).__name__, "a dataclass", "a plain class")
        return {"mechanism": self.name, **asdict(self)}  # type: ignore[call-overload]

    def to_json(self) -> str:
        """`to_dict` as a JSON string.

        >>> import coterie
        >>> coterie.Local(window=64).to_json()
        '{"mechanism": "local", "window": 64}'
        """
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        changed = [
            f"{f.name}={_written(getattr(self, f.name))}"
            for f in fields(self)  # type: ignore[arg-type]
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")

    def _repr_html_(self) -> str:
        """What a notebook shows: its string, and every setting."""
        settings = [(name, _written(value)) for name, value in self.to_dict().items() if name != "mechanism"]
        return output(paragraph(str(self)), facts(settings).html())


_PLAN = Mechanism.plan  # before anybody patches it


class PerQuery(Mechanism):
    """A mechanism in which each query is for itself: others, later ones too, do not change whom it meets."""

    causality: ClassVar[str] = Causality.STRICT
    per_query: ClassVar[bool] = True


def plan_call(mechanism: Mechanism, call: Call) -> Plan:
    """Who meets whom in a call that has been checked; nothing is checked again."""
    if type(mechanism).plan is not _PLAN:  # a mechanism of a user's, or a patch, that plans in a way of its own
        settings: Planning = {**call.planning(), "guests": call.guests}
        return mechanism.plan(call.q, call.k, **settings)
    return mechanism._plan(call)


def without_resampling(mechanism: Mechanism) -> Mechanism:
    """The mechanism with the draws of its seed, as in eval, where fresh ones at every call are not wanted."""
    if not getattr(mechanism, "resample", False):
        return mechanism
    return as_mechanism({**mechanism.to_dict(), "resample": False})


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: let strings, JSON and `list_mechanisms` know a mechanism by this name."""
    plain = isinstance(name, str) and name and name == name.lower() and not set(name) & set(":,=@ ")
    expect(bool(plain), "name", "a lower-case name without ':', ',', '=', '@' or spaces", repr(name))

    def enter(cls: _Class) -> _Class:
        known = _REGISTRY.get(name)
        same = known is None or known.__qualname__ == cls.__qualname__
        expect(same, "name", "a name that is not taken", f"{name!r}, taken by {known}")
        expect_type(issubclass(cls, Mechanism), "cls", "a subclass of coterie.Mechanism", cls)
        cls.name = name
        _REGISTRY[name] = cls
        _FIELDS[name] = tuple(f.name for f in fields(cls)) if is_dataclass(cls) else ()
        return cls

    return enter


def list_mechanisms() -> dict[str, type[Mechanism]]:
    """Every registered mechanism by name.

    >>> import coterie
    >>> list(coterie.list_mechanisms())[:3]
    ['smyrf', 'clustered', 'improved-clustered']
    """
    return dict(_REGISTRY)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(text: str) -> object:
    """A value in a short string. JSON, but read by hand but for quotes and brackets: graphs are compiled through it."""
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text == "null":
        return None
    if _is_number(text):
        return int(text) if text.removeprefix("-").isdecimal() else float(text)
    if text[:1] not in ('"', "[", "{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # of numbers with thousands of digits, of nesting: no field takes the text
        return text


def _is_number(text: str) -> bool:
    """Whether JSON takes a text for a number, and Python does: there may be thousands of digits."""
    if len(text) > 1000:
        return False
    if text in ("NaN", "Infinity", "-Infinity"):
        return True
    mantissa, e, power = text.removeprefix("-").replace("E", "e").partition("e")
    whole, dot, part = mantissa.partition(".")
    exponent = power[1:] if power[:1] in ("+", "-") else power
    digits = [whole, *([part] if dot else []), *([exponent] if e else [])]
    return text.isascii() and all(x.isdecimal() for x in digits) and (whole == "0" or not whole.startswith("0"))


def _make(name: object, settings: dict[str, Any]) -> Mechanism:
    known = ", ".join(_REGISTRY)
    cls = _REGISTRY.get(name.strip().lower().replace("_", "-")) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"mechanism: expected one of {known}, got {name!r}{did_you_mean(name, _REGISTRY)}")
    names = _FIELDS[cls.name]
    for field in settings:
        expect(
            field in names,
            f"mechanism {cls.name}",
            "a field of " + (", ".join(names) or "no fields"),
            f"{field!r}{'' if field in names else did_you_mean(field, names)}",
        )
    return cls(**settings)


def as_mechanism(spec: object) -> Mechanism:
    """A mechanism from itself, its string, or its JSON form (a dict or a JSON object in a string).

    >>> import coterie
    >>> coterie.as_mechanism("smyrf:rounds=2,cluster_size=32")
    Smyrf(rounds=2, cluster_size=32, transform='smyrf', hash='projection', duplicates='count', seed=0, resample=False)
    >>> str(coterie.TopK(k=8)), coterie.as_mechanism({"mechanism": "topk", "k": 8})
    ('topk:k=8', TopK(k=8))

    A string that ends in "@1024", or the key "at_least" in JSON, means: from 1,024 keys on, and dense below.
    """
    if isinstance(spec, Mechanism):
        return spec
    expect_type(isinstance(spec, str | dict), "mechanism", "a Mechanism, a string or a dict", f"{type(spec).__name__}")
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        compiling = torch.compiler.is_compiling()
        expect(not compiling, "mechanism", "a short string or a dict in a compiled graph, which cannot read JSON", spec)
        try:
            spec = json.loads(spec)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"mechanism: expected a JSON object, got {spec!r:.100} ({error})") from error
    if isinstance(spec, dict):
        settings = dict(spec)
        expect(
            "mechanism" in settings,
            "mechanism",
            "a dict with the key 'mechanism'",
            sorted(map(str, settings)),
        )
        return _from(settings.pop("at_least", None), _make(settings.pop("mechanism"), settings))
    plain, at, length = str(spec).partition("@")
    expect(not at or length.isdecimal(), "mechanism", "a number of keys after '@'", repr(spec))
    name, _, rest = plain.partition(":")
    settings = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        field, equals, value = item.partition("=")
        expect(bool(equals), "mechanism", "name:field=value,…", repr(spec))
        field = field.strip()
        expect(field not in settings, "mechanism", f"{field!r} only once", repr(spec))
        settings[field] = _read(value)
    return _from(int(length) if at else None, _make(name, settings))


def _from(length: int | None, mechanism: Mechanism) -> Mechanism:
    if length is None:
        return mechanism
    from coterie.mechanisms.at_least import AtLeast  # which is a mechanism itself

    return AtLeast(length, mechanism)
