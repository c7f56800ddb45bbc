"""`coterie inspect`: which heads are hard, how spectra fall, who is grouped with whom, what mechanisms lose."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

import coterie
from coterie.cli import inputs
from coterie.cli.console import Extend, Json, Text, Trust, bars, out, print_json, print_table, spinner, wrote
from coterie.cli.hearing import hear
from coterie.cli.inputs import Loaded, UserError
from coterie.cli.own import Import, import_files
from coterie.files import expect_writable, shown

_IMAGES = (".png", ".jpg", ".jpeg")


class Across(StrEnum):
    """What memberships are compared over."""

    LAYERS = "layers"
    HEADS = "heads"


class What(StrEnum):
    """What to look at."""

    HEADS = "heads"
    SPECTRA = "spectra"
    MEMBERSHIPS = "memberships"
    ERRORS = "errors"


def inspect(
    model: Annotated[str, typer.Argument(help="As in 'fit'; for memberships also an image (.png, .jpg).")],
    what: Annotated[What, typer.Argument(help="What to look at.")] = What.HEADS,
    text: Text = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens, or pixels a side of an image.")] = 512,
    extend_positions: Extend = False,
    mechanism: Annotated[str, typer.Option(help="Whose errors or groups.")] = "near-far",
    imported: Import = None,
    module: Annotated[str | None, typer.Option(help="Of memberships and errors; the first by default.")] = None,
    head: Annotated[int, typer.Option(min=0, help="Of memberships.")] = 0,
    across: Annotated[
        Across | None, typer.Option(help="How memberships change over layers, or over the heads of --module.")
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(help="A WAV file to listen to instead of text, for a speech model and --across.")
    ] = None,
    keys: Annotated[int, typer.Option(min=1, help="Of errors: keys that each query may meet.")] = 64,
    worst: Annotated[int, typer.Option(min=1, help="How many heads to print.")] = 15,
    trust_remote_code: Trust = False,
    picture: Annotated[
        Path | None, typer.Option("--out", help="Write a picture: .png or .svg; text also .html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Which heads are hard and why: errors of every head, spectra, memberships, or mechanisms side by side."""
    import_files(imported)
    chosen = coterie.as_mechanism(mechanism)
    if what in (What.HEADS, What.ERRORS) and picture is not None:
        raise UserError(f"--out: there is no picture of {what.value}; 'spectra' and 'memberships' have one.")
    image = Path(model).suffix.lower() in _IMAGES
    _check_across(what, across, audio, image)
    page = what is What.MEMBERSHIPS and not image and across is None
    kinds = (".png", ".svg", ".html") if page else (".png", ".svg")
    if picture is not None and picture.suffix.lower() not in kinds:
        raise UserError(f"--out must end in {' or '.join(kinds)}, not {picture.suffix!r}.")
    if picture is not None:
        expect_writable(picture)
    if image:
        if what is not What.MEMBERSHIPS:
            raise UserError(f"an image has no heads: 'coterie inspect {model} memberships' shows its groups.")
        _image(Path(model), chosen, length, picture, as_json)
        return
    source = inputs.read_text(text) if text else inputs.documentation()
    with spinner(f"loading {model}"):
        loaded = inputs.load_model(model, length if extend_positions else None, trust=trust_remote_code)
        if audio is None:
            batch, real = inputs.cut(loaded, source, [length], 2)[0][0], 1.0
        else:
            batch, real = hear(loaded, audio, trust=trust_remote_code)
    looks: dict[What, Callable[[], None]] = {
        What.HEADS: lambda: _heads(loaded, batch, chosen, length, worst, as_json),
        What.SPECTRA: lambda: _spectra(loaded, batch, chosen, worst, picture, as_json),
        What.MEMBERSHIPS: lambda: (
            _text(loaded, batch, chosen, module, head, picture, as_json)
            if across is None
            else _across(loaded, batch, real, chosen, across, module, picture, as_json)
        ),
        What.ERRORS: lambda: _errors(loaded, batch, module, keys, as_json),
    }
    looks[what]()


def _check_across(what: What, across: Across | None, audio: Path | None, image: bool) -> None:
    if across is not None and (what is not What.MEMBERSHIPS or image):
        raise UserError(
            "--across goes with the memberships of a model: coterie inspect MODEL memberships --across layers"
        )
    if audio is not None and across is None:
        raise UserError("--audio goes with memberships --across layers, or --across heads.")


def _heads(loaded: Loaded, batch: Any, mechanism: Any, length: int, worst: int, as_json: bool) -> None:
    from coterie.analysis.head_errors import head_errors

    with spinner("inspecting"):
        found = head_errors(loaded.model, batch, mechanism)
    rows: list[dict[str, Any]] = [
        {"module": module, "head": head, "error": error, "entropy": entropy}
        for module, heads in found.items()
        for head, (error, entropy) in enumerate(heads)
    ]
    rows.sort(key=lambda row: -row["error"])
    if as_json:
        print_json(rows)
        return
    print_table(
        f"{mechanism} on {length} tokens: the hardest of {len(rows)} heads",
        ["attention module", "head", "relative error", "entropy, nats"],
        [[r["module"], str(r["head"]), f"{r['error']:.3f}", f"{r['entropy']:.2f}"] for r in rows[:worst]],
    )


def _spectra(loaded: Loaded, batch: Any, mechanism: Any, worst: int, picture: Path | None, as_json: bool) -> None:
    from coterie.analysis import draw_spectra, save, spectra

    with bars() as tell:
        found = spectra(loaded.model, batch, mechanism=mechanism, progress=tell)
    if picture is not None:
        save(draw_spectra(found, title=loaded.name), picture)
    if as_json:
        print_json(found.table())
        return
    rows = sorted(found.table(), key=lambda row: row["rate"])
    print_table(
        f"the {min(worst, len(rows))} heads whose singular values fall most slowly",
        ["attention module", "head", "effective rank", "values for 90 %", "decay rate", "R²", "slow", "relative error"],
        [
            [
                row["module"],
                str(row["head"]),
                f"{row['effective_rank']:.1f}",
                str(row["rank_90"]),
                f"{row['rate']:.4f}",
                f"{row['r2']:.3f}",
                "yes" if row["slow"] else "",
                f"{row['error']:.3f}",
            ]
            for row in rows[:worst]
        ],
    )
    out.print(shown(found.describe()), markup=False)
    _wrote(picture)


def _text(
    loaded: Loaded, batch: Any, mechanism: Any, module: str | None, head: int, picture: Path | None, as_json: bool
) -> None:
    from coterie.analysis import draw_tokens, groups_of, locality, save, tokens_html

    name, call = _call(loaded, batch, module)
    plan = mechanism.plan(call["q"], call["k"], **call["planning"])
    if head >= plan.heads:
        raise UserError(f"--head must be below {plan.heads}, the heads of {name}, not {head}.")
    labels = groups_of(plan, head=head)
    tokens = loaded.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    title = f"{loaded.name}, {name}, head {head}: {mechanism}"
    if picture is not None:
        page = picture.suffix.lower() == ".html"
        save(tokens_html(tokens, labels, title=title) if page else draw_tokens(tokens, labels, title=title), picture)
    _memberships(title, labels, locality(plan, head=head), picture, as_json)


def _across(
    loaded: Loaded,
    batch: Any,
    real: float,
    mechanism: Any,
    across: Across,
    module: str | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    from coterie.analysis import agreement, draw_agreement, head_groups, save

    known = list(coterie.hf.attention_modules(loaded.model))
    if module is not None and (across is Across.LAYERS or module not in known):
        allowed = f"one of {', '.join(known)}" if across is Across.HEADS else "left out with --across layers"
        raise UserError(f"--module must be {allowed}, not {module!r}.")
    within = "encoder" if loaded.model.config.is_encoder_decoder else ""
    with spinner("grouping"):
        labels = head_groups(loaded.model, batch, mechanism, within=within)
        found = agreement({head: each[: math.ceil(real * len(each))] for head, each in labels.items()})
    if across is Across.HEADS and module is not None and module not in found.modules:
        raise UserError(f"{module} has no groups to compare; those that have: {', '.join(found.modules)}.")
    title = f"{loaded.name}: {mechanism}"
    if picture is not None:
        save(draw_agreement(found, across=across.value, module=module, title=title), picture)
    if as_json:
        print_json(
            {
                "heads": [{"module": name, "head": head} for name, head in found.heads],
                "layers": found.layers().tolist(),
                "index": found.index.tolist(),
            }
        )
        return
    if across is Across.HEADS:
        chosen = module or found.modules[0]
        rows = [[str(head), *(f"{x:.3f}" for x in row)] for head, row in enumerate(found.of(chosen).tolist())]
        print_table(f"{title}: adjusted Rand index of the heads of {chosen}", ["head", *(row[0] for row in rows)], rows)
    else:
        table = found.table()
        print_table(f"{title}: mean adjusted Rand index of the heads of two layers", table.columns, table.rows)
    out.print(shown(found.describe()), markup=False)
    _wrote(picture)


def _image(path: Path, mechanism: Any, side: int, picture: Path | None, as_json: bool) -> None:
    from coterie.analysis import draw_grid, groups_of, image_queries, locality, save

    colours = _pixels(path)
    height, width = colours.shape[:2]
    shrink = max(1.0, max(height, width) / side)
    pixels = image_queries(colours, grid=(round(height / shrink), round(width / shrink)))
    with spinner("grouping"):
        plan = mechanism.plan(pixels.q, pixels.q)
        labels = groups_of(plan)
    if picture is not None:
        save(draw_grid({str(mechanism): labels}, pixels.grid, image=pixels.image), picture)
    title = f"{path.name}, {pixels.grid[0]} × {pixels.grid[1]} pixels: {mechanism}"
    _memberships(title, labels, locality(plan, grid=pixels.grid), picture, as_json)


def _memberships(title: str, labels: Tensor, local: Any, picture: Path | None, as_json: bool) -> None:
    groups = int(labels[labels >= 0].unique().numel())
    if as_json:
        by_distance = dict(zip(local.distances, local.shares, strict=True))
        print_json({"groups": groups, "labels": labels.tolist(), "together": by_distance, "chance": local.chance})
        return
    print_table(
        f"{title}: {groups} groups",
        ["distance", "share of pairs in one group"],
        [[f"{d:,}", f"{s:.1%}"] for d, s in zip(local.distances, local.shares, strict=True)],
    )
    out.print(f"neighbours {local.near:.1%}, distant ones {local.far:.1%}, all pairs {local.chance:.1%}")
    _wrote(picture)


def _errors(loaded: Loaded, batch: Any, module: str | None, keys: int, as_json: bool) -> None:
    from coterie.analysis import compare

    name, call = _call(loaded, batch, module)
    with spinner("comparing"):
        found = compare(None, call["q"], call["k"], call["v"], keys=keys, rows=256, **call["planning"])
    if as_json:
        print_json({"module": name, **found.to_dict()})
        return
    out.print(f"{loaded.name}, {name}: about {keys} keys a query", markup=False)
    out.print(shown(str(found)), markup=False, highlight=False, soft_wrap=True)


def _call(loaded: Loaded, batch: Any, module: str | None) -> tuple[str, dict[str, Any]]:
    """What one attention module is called with."""
    from coterie.hosts import watch_dense
    from coterie.observe import Seen

    known = list(coterie.hf.attention_modules(loaded.model))
    wanted = known[0] if module is None else module
    if wanted not in known:
        raise UserError(f"--module must be one of {', '.join(known)}, not {wanted!r}.")
    found: dict[str, Any] = {}

    def look(name: str, seen: Seen) -> None:
        if name == wanted:
            found.update(q=seen.q, k=seen.k, v=seen.v, planning=seen.planning())

    with spinner("running the model"):
        watch_dense(loaded.model, batch, look)
    if not found:
        width = coterie.hf.own_windows(loaded.model).get(wanted)
        words = "ran with few queries alone" if width is None else f"has its own window ({width})"
        raise UserError(f"{wanted} {words}, and no dense map.")
    return wanted, found


def _pixels(path: Path) -> Any:
    from matplotlib.image import imread

    try:
        colours = imread(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or 'not an image'}.") from error
    except (ValueError, SyntaxError) as error:
        raise UserError(f"{path} is not an image.") from error
    return colours[..., :3] if colours.ndim == 3 else colours[..., None].repeat(3, -1)


def _wrote(picture: Path | None) -> None:
    if picture is not None:
        wrote(picture)
