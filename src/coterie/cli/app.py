"""The `coterie` command: `fit`, `run`, `bench`, `mechanisms`; `inspect`, `report`, `theory`, `doctor` are apart."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from inspect import getattr_static
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

import coterie
from coterie.checks import did_you_mean
from coterie.cli import doctor, inputs, inspect, report, theory, vectors
from coterie.cli.console import (
    Extend,
    Json,
    Model,
    Text,
    Trust,
    bars,
    err,
    out,
    print_json,
    print_table,
    spinner,
    wrote,
)
from coterie.cli.inputs import UserError, parse_numbers
from coterie.cli.own import Import, import_files, parse_candidates, unknown_names
from coterie.cli.sentences import run_command
from coterie.cli.stored import begins_at, read_fit
from coterie.files import expect_writable, shown
from coterie.fitting.decoding.result import Decoding
from coterie.fitting.fit import Fit, trade_off
from coterie.fitting.tables import choices_table, contexts_table, decoding_table, lengths_table, trade_off_table
from coterie.report.words import measure_words
from coterie.timing import interleaved

app = typer.Typer(
    help="Clustered attention: the cheapest that keeps a model's answers, with the proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"coterie {coterie.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Clustered attention: the cheapest that keeps a model's answers, with the proof."""
    context.obj = debug


# --- fit --------------------------------------------------------------------------------------------------------------


@app.command("fit")
def fit_command(
    model: Model,
    text: Text = None,
    fidelity: Annotated[
        str, typer.Option(help="In (0, 1]; several, separated by commas, share their work and are compared.")
    ] = "0.99",
    lengths: Annotated[str, typer.Option(help="Tokens in a sequence, separated by commas.")] = "512",
    confidence: Annotated[float, typer.Option(help="Of the promise, in [0.5, 1).")] = 0.95,
    share: Annotated[
        float | None, typer.Option(help="Promise the fidelity to this share of documents instead of on average.")
    ] = None,
    sequences: Annotated[
        int, typer.Option(min=2, help="Of each length: a third is searched on, the others certify what is promised.")
    ] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run together.")] = 1,
    extend_positions: Extend = False,
    measure: Annotated[str | None, typer.Option(help="'hidden' or 'loss'.")] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(help="Mechanisms to try, separated by commas; each has its own seed. The usual ones by default."),
    ] = None,
    imported: Import = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also choose what answers new tokens, for models that write.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="A budget of time for all of it, loading and report included.")
    ] = None,
    seed: int = 0,
    trust_remote_code: Trust = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write a report (HTML).")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the choice (JSON), for 'run' and coterie.hf.load.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the cheapest attention that keeps a model's answers on your text, and certify it on held-out text."""
    start = time.monotonic()
    import_files(imported)
    mechanisms_to_try = parse_candidates(candidates)
    fidelities = inputs.parse_shares("--fidelity", fidelity)
    if not 0.5 <= confidence < 1:
        raise UserError(f"--confidence must be in [0.5, 1), not {confidence}.")
    if share is not None and not 0 < share < 1:
        raise UserError(f"--share must be in (0, 1), not {share}.")
    if share is not None and batch > 1:
        raise UserError("--share counts documents, and a batch is judged as one: leave --batch at 1.")
    if seconds is not None and not seconds >= 0:
        raise UserError(f"--seconds must be 0 or more, not {seconds}.")
    if measure not in (None, "hidden", "loss"):
        raise UserError(f"--measure must be 'hidden' or 'loss', not {measure!r}.")
    for path in (*filter(None, [out_file]), *_saved(save, fidelities)):
        expect_writable(path)
    wanted = parse_numbers("--lengths", lengths)
    source = inputs.read_text(text) if text else inputs.documentation()
    with spinner(f"loading {model}"):
        loaded = inputs.load_model(model, max(wanted) if extend_positions else None, trust=trust_remote_code)
        fitted, held_out = inputs.cut(loaded, source, wanted, sequences, batch, seed)
    with bars() as tell:
        found = trade_off(
            loaded.model,
            fitted,
            fidelities,
            confidence=confidence,
            share=share,
            measure=measure,
            held_out=held_out,
            candidates=mechanisms_to_try,
            decode=decode,
            seconds=None if seconds is None else _left(seconds, start, report=out_file is not None),
            seed=seed,
            progress=tell,
        )
    # What was found is told first, and stored before anything is drawn: a disk may be full by now, a user impatient.
    if as_json:
        print_json(found[0].to_dict() if len(found) == 1 else [each.to_dict() for each in found])
    else:
        for each in found:
            _show(each, loaded.name)
        if len(found) > 1:
            print_table("what fidelity costs", *trade_off_table(found))
    files = dict(zip(fidelities, _saved(save, fidelities), strict=False))  # none, if nothing is to be stored
    saved = [files[each.fidelity] for each in found if files]
    for path, each in zip(saved, found, strict=False):
        each.save(path)
    if out_file is not None:
        from coterie.report import Pictures, write_several

        pictures = []
        if _time_for_pictures(found, math.inf if seconds is None else seconds - (time.monotonic() - start)):
            with bars() as tell:
                pictures = [Pictures.of(loaded.model, each, held_out[-1], tell) for each in found]
        elif not as_json:
            out.print("no time was left for pictures of heads: 'coterie fit' without --seconds draws them")
        command = shlex.join(["coterie", *sys.argv[1:]])
        write_several(out_file, found, pictures, model=loaded.name, command=command)
    for path in [*saved, *filter(None, [out_file])] if not as_json else ():
        wrote(path)
    if not all(each.holds for each in found):
        raise typer.Exit(3)  # 2 is a wrong option


def _saved(path: Path | None, fidelities: list[float]) -> list[Path]:
    """Each fit in a file of its own: coterie.json, or coterie-0.95.json, coterie-0.99.json."""
    if path is None:
        return []
    return [path if len(fidelities) == 1 else path.with_stem(f"{path.stem}-{each!r}") for each in fidelities]


def _time_for_pictures(found: list[Fit], left: float) -> bool:
    """Whether what is left of a budget is enough to look at every head: a few dense passes for each fit."""
    passes = [at.dense_seconds for at in found[0].lengths]
    return left == math.inf or (bool(passes) and left > 4 * len(found) * max(passes))


def _left(seconds: float, start: float, *, report: bool) -> float:
    """What a budget that began with the command leaves to the fit; a report takes a twentieth."""
    return max(0.0, (0.95 if report else 1.0) * seconds - (time.monotonic() - start))


def _show(found: Fit, model: str) -> None:
    print_table(f"{model}: {measure_words(found.measure)} ≥ {found.fidelity}", *choices_table(found))
    if found.lengths:
        print_table("held-out text", *lengths_table(found))
    color = "green" if found.certified else "yellow" if found.holds else "red"
    out.print(f"[{color}]{found.promise}[/]", highlight=False)
    out.print(found.speed, highlight=False)
    for note in found.notes:
        out.print(shown(note), markup=False)
    if found.decode is not None:
        _show_decoding(found, found.decode)


def _show_decoding(found: Fit, decode: Decoding) -> None:
    if not decode.all_dense:
        print_table("new tokens", *decoding_table(decode))
    if decode.lengths:
        print_table("decoding behind held-out text", *contexts_table(found))
    sure = decode.certified or decode.held_out >= found.fidelity
    color = "green" if decode.certified else "yellow" if sure else "red"
    out.print(f"[{color}]{found.decode_promise}[/]", highlight=False)
    out.print(decode.speed, highlight=False)
    for note in decode.notes:
        out.print(shown(note), markup=False)


# --- run --------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    model: Model,
    text: Text = None,
    fitted: Annotated[Path | None, typer.Option("--fit", help="What 'fit --save' wrote.")] = None,
    imported: Import = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    new_tokens: Annotated[
        int, typer.Option("--tokens", "--new-tokens", min=1, help="To write, by models that generate.")
    ] = 64,
    length: Annotated[int | None, typer.Option(min=1, help="At most so many tokens.")] = None,
    extend_positions: Extend = False,
    trust_remote_code: Trust = False,
    vector_file: Annotated[
        Path | None, typer.Option("--out", help="Write an embedding: .npy, .json or .parquet.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Embed a text, or go on writing it, with a fitted model. Ctrl-C ends the writing."""
    import_files(imported)
    if prompt is not None and text:
        raise UserError("--prompt and --text both give a text: leave one of them out.")
    if vector_file is not None:
        vectors.check_file(vector_file)
    if prompt is not None and not prompt.strip():
        raise UserError("--prompt must be a text, and it is empty.")
    source = prompt or (inputs.read_text(text) if text else inputs.documentation()[:2000])
    with spinner(f"loading {model}"):
        if extend_positions and length is None:
            raise UserError("--extend-positions needs a --length to extend them to.")
        loaded = inputs.load_model(
            model,
            length if extend_positions else None,
            trust=trust_remote_code,
            replaceable=fitted is not None,  # as it is, any model runs
        )
        plan = None if fitted is None else _known(fitted, read_fit(fitted))
        if plan is not None:
            plan.apply(loaded.model)
    if vector_file is not None and loaded.speaks:
        raise UserError(f"--out is for embeddings, and {loaded.name} writes text.")
    room = inputs.position_limit(loaded.model)
    if length is not None:
        inputs.check_length(loaded, length)
    limit = min(filter(None, (length, room)), default=None)
    if loaded.speaks and room is not None:
        if new_tokens >= room:
            raise UserError(f"--tokens must be below the {room} positions of {loaded.name}, not {new_tokens}.")
        limit = min(limit or room, room - new_tokens)
    settings = {"truncation": True, "max_length": limit} if limit else {}
    whole = len(inputs.encode(loaded, source))
    batch = loaded.tokenizer(source, return_tensors="pt", verbose=False, **settings)
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    tokens = batch["input_ids"].shape[1]
    first = f"the first {tokens:,} tokens of about {whole:,}" if tokens < whole else f"{tokens:,} tokens"
    if plan is not None and plan.lengths and tokens > (longest := max(at.tokens for at in plan.lengths)):
        err.print(
            f"note: {fitted} was fitted up to {longest:,} tokens, so nothing is promised of {tokens:,}.", soft_wrap=True
        )
    if plan is not None and (begins := begins_at(plan)) > (tokens + new_tokens - 1 if loaded.speaks else tokens):
        where = f"begins at {begins:,} tokens" if math.isfinite(begins) else "is dense everywhere"
        err.print(f"note: nothing of {fitted} is used here, as it {where}: attention is dense.", soft_wrap=True)
    if loaded.speaks:
        _write(loaded, batch, new_tokens, first, as_json=as_json)
        return
    start = time.perf_counter()
    with spinner("running"), torch.no_grad():
        hidden, mask = loaded.model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        answer = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)[0]
    taken = time.perf_counter() - start
    facts = {"tokens": tokens, "seconds": taken}
    if as_json:
        print_json(facts | {"embedding": answer.tolist()})
    else:
        out.print(vectors.summary(answer), markup=False)
    if vector_file is not None:
        vectors.write_vector(vector_file, answer, facts)
        if not as_json:
            wrote(vector_file)
    err.print(f"{first} in {taken:.2f} s")


def _write(loaded: inputs.Loaded, batch: dict[str, torch.Tensor], new_tokens: int, read: str, *, as_json: bool) -> None:
    """Go on writing a text: it is printed as it comes, and then how fast it came."""
    from coterie.cli.writing import write

    with torch.no_grad():
        found = write(loaded.model, loaded.tokenizer, batch, new_tokens, aloud=not as_json)
    tokens = batch["input_ids"].shape[1]
    if as_json:
        taken = found.prefill_seconds + found.decode_seconds
        print_json({"tokens": tokens, "seconds": taken, **found._asdict()})
    err.print(f"{read}: {found.speeds(tokens)}", highlight=False, soft_wrap=True)
    if found.stopped:
        raise typer.Exit(130)


def _known(path: Path, found: Fit) -> Fit:
    over_cache = {} if found.decode is None else found.decode.choices
    for name in unknown_names([*found.choices.values(), *over_cache.values()]):
        meant = did_you_mean(name, coterie.list_mechanisms())
        raise UserError(
            f"{path} names the mechanism {name!r}, which is not known{meant}; if it is yours, --import its file."
        )
    return found


app.command("report")(report.report)
app.command("inspect")(inspect.inspect)
app.add_typer(theory.app, name="theory")


# --- bench ------------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    mechanism: Annotated[list[str] | None, typer.Argument(help="Mechanisms; a few by default.")] = None,
    lengths: str = "1024,4096",
    heads: int = 8,
    dim: int = 64,
    causal: bool = False,
    repeats: int = 5,
    imported: Import = None,
    as_json: Json = False,
) -> None:
    """Time mechanisms against PyTorch's dense attention, interleaved, planning included."""
    import_files(imported)
    names = mechanism or ["near-far", "smyrf", "local"]
    wanted = [coterie.as_mechanism(name) for name in names]
    rows: list[dict[str, Any]] = []
    done = 0
    with bars() as tell, torch.no_grad():
        for length in parse_numbers("--lengths", lengths):
            q, k, v = torch.randn(3, 1, heads, length, dim, generator=torch.Generator().manual_seed(0)).unbind(0)
            runs: dict[str, Callable[[], Any]] = {
                "sdpa": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
            }
            for each in wanted:
                runs[str(each)] = partial(coterie.attention, q, k, v, each, is_causal=causal)

            def tick() -> None:
                nonlocal done
                done += 1
                tell("timing", done, (repeats + 1) * len(parse_numbers("--lengths", lengths)))

            times = interleaved(runs, repeats, tick)
            for name, taken in times.items():
                rows.append({"tokens": length, "mechanism": name, "seconds": taken, "ratio": times["sdpa"] / taken})
    if as_json:
        print_json(rows)
        return
    print_table(
        f"{heads} heads × {dim}, medians of {repeats}",
        ["mechanism", "tokens", "ms", "against SDPA"],
        [
            [row["mechanism"], f"{row['tokens']:,}", f"{row['seconds'] * 1e3:.1f}", f"{row['ratio']:.2f}×"]
            for row in rows
        ],
    )
    print_table("crossover", ["mechanism", "faster than SDPA from"], _crossovers(rows), words=(0, 1))


def _crossovers(rows: list[dict[str, Any]]) -> list[list[str]]:
    """For each mechanism, the measured length from which on it was faster at every one.

    Example:
        >>> rows = [
        ...     {"tokens": tokens, "mechanism": "local", "ratio": ratio}
        ...     for tokens, ratio in ((64, 1.1), (128, 0.9), (256, 1.5), (512, 3.0))
        ... ]
        >>> _crossovers(rows), _crossovers(rows[:2])
        ([['local', '256 tokens on']], [['local', 'none of those measured']])
    """
    found = []
    for name in dict.fromkeys(row["mechanism"] for row in rows if row["mechanism"] != "sdpa"):
        longest_first = sorted((row for row in rows if row["mechanism"] == name), key=lambda row: -row["tokens"])
        faster = list(takewhile(lambda row: row["ratio"] > 1, longest_first))
        found.append([name, f"{faster[-1]['tokens']:,} tokens on" if faster else "none of those measured"])
    return found


# --- mechanisms -------------------------------------------------------------------------------------------------------


@app.command()
def mechanisms(as_json: Json = False) -> None:
    """Every mechanism, its settings and how it treats the future."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "settings": {f.name: f.default for f in fields(cls)},  # type: ignore[arg-type]
            "causality": str(getattr_static(cls, "causality")),  # which may depend on settings
            "what": (cls.__doc__ or "").strip().split(".")[0].split(":")[0],
        }
        for name, cls in coterie.list_mechanisms().items()
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        "mechanisms",
        ["mechanism", "settings", "causality"],
        [[r["name"], ", ".join(f"{key}={x}" for key, x in r["settings"].items()), r["causality"]] for r in rows],
        words=(0, 1, 2),
    )


app.command("doctor")(doctor.doctor)


def main() -> None:
    """The entry point: errors in one sentence, and exit codes that scripts can use."""
    run_command(app, "coterie", memory="try shorter --lengths")
