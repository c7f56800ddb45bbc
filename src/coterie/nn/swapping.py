"""`swap`: put mechanisms into a model's attention, in place, and take them out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from coterie.checks import expect, expect_type
from coterie.functional import MechanismLike
from coterie.nn.adapters import Adapter, adapter_of, attends_by_hand, check_known
from coterie.nn.caught import Caught, is_caught
from coterie.nn.multihead import MultiheadAttention
from coterie.sdpa.scope import Chosen, Scope, check_modules
from coterie.tables import facts, output, paragraph

_WANTED = "a model that contains attention (torch.nn.MultiheadAttention, or modules that are not PyTorch's own)"


class Swap:
    """What `swap` changed; `undo()` puts it back. Also a context manager.

    Attributes:
        replaced: the modules that were replaced, by name: PyTorch's own, and those that an adapter knows.
        calls: what has run so far in calls of SDPA, by the name of the call: a mechanism, or "dense".
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._scope = Scope(Chosen(None))
        self.replaced: list[str] = []

    @property
    def calls(self) -> dict[str, str]:
        """What has run so far, by the name of the call."""
        return self._scope.calls

    def __repr__(self) -> str:
        return f"Swap(replaced={self.replaced}, calls={self.calls})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        replaced = [(name, "replaced") for name in self.replaced if name not in self.calls]
        seen = f"{len(self.calls)} calls of SDPA seen" if self.calls else "no call of SDPA seen yet"
        title = f"{len(self.replaced)} modules replaced, {seen}"
        return output(paragraph(title), facts([*replaced, *self.calls.items()]).html())

    def undo(self) -> None:
        """Put the model's own attention back, with the parameters as they are now."""
        self._scope.active = False
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def swap(model: nn.Module, mechanism: MechanismLike | Mapping[str, MechanismLike | None] | None) -> Swap:
    """Put a mechanism into a model's attention, in place; its parameters stay.

    Three kinds of attention are reached. Every `torch.nn.MultiheadAttention` is replaced by Coterie's, layers numbered
    in the order of `model.named_modules()`; it holds in `eval()` under `no_grad` too, as PyTorch's fast paths are kept
    shut. Modules that an `adapter` knows attend by it. And calls of `scaled_dot_product_attention` that any module
    makes in its forward are caught, as `coterie.replacing` does: "blocks.0.attn", "blocks.0.attn#1" if one module makes
    several; so are those of a torch.nn.MultiheadAttention with a forward of its own or parametrized weights, which
    stays. Attention that is written out by hand, and that no adapter knows, is refused by name.

    Args:
        model: any model; it must not itself be a torch.nn.MultiheadAttention.
        mechanism: who meets whom; or a dict from names of modules and calls to that, and others keep what they have.
            None and "dense" are the model's own attention. The first forward of the whole model warns of names that no
            call had.

    Returns:
        A `Swap`: `replaced` and `calls` say what is swapped, `undo()` restores it.

    Example:
        >>> import coterie, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> swapped = coterie.nn.swap(model, "smyrf:cluster_size=32")
        >>> swapped.replaced
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> swapped.undo()
    """
    chosen = Chosen(mechanism)
    expect_type(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    found = Found(model)
    found.check(chosen)
    done = Swap()
    done._scope = Scope(chosen)
    _replace_torchs(done, found, chosen)
    done._scope.awaited = [name for name in chosen.names if chosen.of(name) and name not in done.replaced]
    for name, module in found.callers(done.replaced).items():
        caught = Caught(module, name, done._scope, found.adapters.get(name), whole=found.checks_calls(name))
        done._undo.append(caught.take)
        caught.put()
    done.replaced += [name for name in found.adapters if chosen.clusters(name)]
    return done


class Found:
    """Where attention may be in a model, by the names of modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        every = list(model.named_modules(remove_duplicate=False))
        torchs = [(name, m) for name, m in every if isinstance(m, nn.MultiheadAttention) and not _is_ours(m)]
        torchs = [(name, module) for name, module in torchs if adapter_of(module) is None]
        self.torchs = [(name, module) for name, module in torchs if _is_plain(module)]
        kept = {id(module) for _, module in torchs if not _is_plain(module)}
        self.swapped = [name for name, module in every if _is_ours(module) or is_caught(module)]
        each = dict(model.named_modules())
        mine = {
            name: module
            for name, module in each.items()
            if id(module) in kept or not (_is_torchs(module) or _is_ours(module))
        }
        adapters = {name: adapter_of(module) for name, module in each.items()}
        self.adapters: dict[str, Adapter] = {name: a for name, a in adapters.items() if a is not None}
        # Whoever is not PyTorch's own may call SDPA; the model itself sees whether anybody did.
        others = {*mine, *self.adapters, *([""] if mine else [])}
        self.others = {name: module for name, module in each.items() if name in others}

    def callers(self, replaced: list[str]) -> dict[str, nn.Module]:
        """Modules whose calls are caught; PyTorch's own attention, where it is left, so that its call has its name."""
        if not self.others:
            return {}
        left = {id(module): (name, module) for name, module in reversed(self.torchs) if name not in replaced}
        return {**self.others, **dict(left.values())}

    def names(self) -> list[str]:
        """Modules that are replaced, known before the model has run."""
        return [*dict.fromkeys(name for name, _ in self.torchs), *self.adapters]

    def check(self, chosen: Chosen) -> None:
        """Refuse a model that nothing can be done with, and names that it does not have."""
        got = type(self.model).__name__
        if self.swapped and (not self.torchs or any(is_caught(module) for module in self.model.modules())):
            raise ValueError(f"model: expected {_WANTED}, got one that is already swapped; undo() that first")
        expect(bool(self.torchs or self.others) and all(name for name, _ in self.torchs), "model", _WANTED, got)
        if chosen.by_name:
            check_modules(chosen, dict.fromkeys([*self.others, *(name for name, _ in self.torchs)]))
        named = set(chosen.modules())
        check_known(
            {
                name: module
                for name, module in self.others.items()
                if name not in self.adapters
                and attends_by_hand(module)
                and (name in named or (not chosen.by_name and chosen.clusters(name)))
            }
        )

    def checks_calls(self, name: str) -> bool:
        """Whether a module is the model itself, and what it calls is all that there is."""
        return name == "" and not self.torchs and not self.swapped


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, MultiheadAttention)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_plain(module: nn.MultiheadAttention) -> bool:
    """Whether Coterie's forward says what its own does: it is PyTorch's, on parameters as they are stored."""
    own = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
    return own and not is_parametrized(module)


def _replace_torchs(done: Swap, found: Found, chosen: Chosen) -> None:
    """Coterie's MultiheadAttention in the place of PyTorch's."""
    made: dict[int, MultiheadAttention] = {}
    numbers: dict[int, int] = {}
    for name, module in found.torchs:
        layer = numbers.setdefault(id(module), len(numbers))
        mine = chosen.of(name) if chosen.names_call(name) else None
        if mine is None:
            continue
        ours = made.setdefault(id(module), MultiheadAttention.from_torch(module, mine, layer=layer, name=name))
        parent_name, _, leaf = name.rpartition(".")
        _set_module(done, found.model.get_submodule(parent_name), leaf, module, ours)
        done.replaced.append(name)
    for encoder in found.model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor and made:
            encoder.use_nested_tensor = False
            done._undo.append(partial(setattr, encoder, "use_nested_tensor", True))


def _set_module(done: Swap, parent: nn.Module, leaf: str, theirs: Any, ours: MultiheadAttention) -> None:
    def restore() -> None:
        theirs.train(ours.training)
        theirs._parameters.update(ours._parameters)
        theirs._modules.update(ours._modules)
        parent._modules[leaf] = theirs

    parent._modules[leaf] = ours
    done._undo.append(restore)
