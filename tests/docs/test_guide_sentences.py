"""What the guide says of padding, masks and causality: each test quotes its sentence, which must stand there."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import coterie
from tests.cases import CAUSAL, MECHANISMS, STRICT, close, padding, tensors

DOCS = Path(__file__).parents[2] / "docs"


def says(sentence: str, page: str = "guide/padding.md") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test is about this sentence of the page."""
    text = re.sub(r"\s+", " ", (DOCS / page).read_text())
    assert sentence in text, f"docs/{page} does not say: {sentence}"
    return lambda test: test


both = pytest.mark.usefixtures("backend")
# One setting of each; mechanisms/test_invariance.py goes through the others.
EACH = ("smyrf", "clustered", "improved", "near-far", "reformer", "routing", "local", "longformer", "topk", "full")
every = pytest.mark.parametrize("name", EACH)


@both
@every
@says("Whatever padded queries, keys and values contain changes nothing, NaN included; padded queries give 0.")
def test_what_stands_in_the_padding_changes_no_bit(name):
    mask = padding(3, 33, [33, 12, 0], "left")
    inputs, found = tensors(3, 2, 33), []
    for wild in (0.0, math.nan, -math.inf):
        leaves = [torch.where(mask[:, None, :, None], x, wild).requires_grad_() for x in inputs]
        out = coterie.attention(leaves[0], leaves[1], leaves[2], MECHANISMS[name], key_mask=mask)
        assert (out.transpose(1, 2)[~mask] == 0).all()
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@both
@every
@pytest.mark.parametrize("side", ["right", "left", "scattered"])
@says("A sample gives the same result as it would alone, however it is padded.")
def test_a_sample_gives_what_it_would_give_alone(name, side):
    if side == "scattered" and name in ("local", "longformer"):
        pytest.skip("the next sentence is about these")
    q, k, v = tensors(3, 2, 40)
    mask = padding(3, 40, [40, 17, 1], side)
    out = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask)
    for b in range(3):
        q_b, k_b, v_b = (x[b : b + 1, :, mask[b]] for x in (q, k, v))
        close(out[b, :, mask[b]], coterie.attention(q_b, k_b, v_b, MECHANISMS[name])[0])


@both
@pytest.mark.parametrize(("name", "global_tokens"), [("local", 0), ("longformer", 2)])
@says("`Local` and `Longformer` count positions, so to them padding inside a sequence is distance.")
def test_padding_inside_a_sequence_is_distance_to_windows(name, global_tokens):
    q, k, v = tensors(1, 2, 40)
    mask = padding(1, 40, [25], "scattered")
    out = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask)
    place = torch.arange(40)
    special = torch.zeros(40, dtype=torch.bool)
    special[mask[0].nonzero().flatten()[:global_tokens]] = True
    met = ((place[:, None] - place).abs() <= 7) | special | special[:, None]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=met & mask[0])
    close(out[:, :, mask[0]], want[:, :, mask[0]])
    q, k, v = (x[:, :, mask[0]] for x in (q, k, v))
    alone = coterie.attention(q, k, v, MECHANISMS[name])
    assert not torch.allclose(alone, out[:, :, mask[0]], atol=1e-2)


@both
@says(
    "The masks of a call always win. A plan cannot bring a padded token back, and a plan whose means would mix padding "
    "in is refused."
)
def test_the_masks_of_a_call_always_win():
    q, k, v = tensors(2, 2, 30)
    mask = padding(2, 30, [30, 11], "right")
    everyone = coterie.Full().plan(q, k)
    out = coterie.attention(q, k, v, None, plan=everyone, key_mask=mask)
    close(out[1, :, :11], F.scaled_dot_product_attention(q[1, :, :11], k[1, :, :11], v[1, :, :11]))
    assert (out[1, :, 11:] == 0).all()
    for name, said in (("clustered", "query_mask"), ("near-far", "key_mask")):
        with pytest.raises(ValueError, match=f"{said}: expected to be the mask that the plan's means were made with"):
            coterie.attention(q, k, v, None, plan=MECHANISMS[name].plan(q, k), key_mask=mask)


@both
@says("the engine applies the masks of the call: padding that a plan names is not met,", page="mechanisms.md")
@says("and a mean that contains padding is refused.", page="mechanisms.md")
@says("Every index of a plan is validated before it runs,", page="mechanisms.md")
def test_what_is_seen_to_whatever_a_mechanism_writes(backend):
    """Masks and means: the test above and mechanisms/test_padding.py. Indices: here, with a mechanism that errs."""

    class Errs(coterie.Full):
        def build(self, tokens):
            plan = super().build(tokens)
            plan.rounds[0].key_order[..., 3] = 99
            return plan

    q, k, v = tensors(1, 1, 10)
    with pytest.raises(ValueError, match=r"rounds\[0\].key_order: expected indices in \[0, 10\), got 99"):
        coterie.attention(q, k, v, Errs())


@every
@says("With Nq = Nk and only a key mask, the same mask is used for the queries.")
def test_a_key_mask_alone_is_taken_for_the_queries_too(name):
    q, k, v = tensors(2, 2, 33)
    mask = padding(2, 33, [33, 9], "right")
    alone = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask)
    assert torch.equal(alone, coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask, query_mask=mask))


@both
@says("For cross-attention between equal lengths, pass `query_mask`.")
def test_cross_attention_between_equal_lengths_passes_its_own_mask():
    q, k, v = tensors(2, 2, 33)
    key_mask, everyone = padding(2, 33, [33, 9], "right"), torch.ones(2, 33, dtype=torch.bool)
    out = coterie.attention(q, k, v, "full", key_mask=key_mask, query_mask=everyone)
    close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask[:, None, None]))


@both
@pytest.mark.parametrize("name", ["local", "longformer", "full", "reformer-strict"])
@pytest.mark.parametrize("causal", [False, True])
@says(
    "If queries and keys are padded differently, use `causal_offset` to say where the queries sit: an int, or one "
    "integer per sample."
)
def test_padding_that_differs_needs_an_offset(name, causal):
    q, k, v = tensors(2, 2, 30, 50)
    query_mask, key_mask = padding(2, 30, [30, 11], "left"), padding(2, 50, [44, 20], "right")
    masks = {"query_mask": query_mask, "key_mask": key_mask, "is_causal": causal}
    # In the padded tensors the last query, row 29, is level with the last real key.
    out = coterie.attention(q, k, v, MECHANISMS[name], causal_offset=torch.tensor([43 - 29, 19 - 29]), **masks)
    for b in range(2):
        own = q[b : b + 1, :, query_mask[b]], k[b : b + 1, :, key_mask[b]], v[b : b + 1, :, key_mask[b]]
        close(out[b, :, query_mask[b]], coterie.attention(*own, MECHANISMS[name], is_causal=causal)[0])
    first = coterie.attention(q, k, v, MECHANISMS[name], causal_offset=14, **masks)
    close(first[0], out[0])


# --- causality -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", [name for name in EACH if name in CAUSAL])
@says(
    "**mask**: no value from the future is averaged in. The grouping may still depend on later tokens, as in the "
    "papers.",
    page="guide/causality.md",
)
def test_no_value_from_the_future_is_averaged_in(name):
    q, k, v = tensors(1, 2, 40)
    out = coterie.attention(q, k, v, CAUSAL[name], is_causal=True)
    later = torch.where(torch.arange(40)[:, None] < 20, v, math.nan)
    close(coterie.attention(q, k, later, CAUSAL[name], is_causal=True)[:, :, :20], out[:, :, :20])


@both
@pytest.mark.parametrize("name", STRICT)
@says(
    "**strict**: changing any later token leaves earlier rows of the plan identical and earlier outputs equal up to "
    "rounding.",
    page="guide/causality.md",
)
def test_strict_rows_do_not_depend_on_later_tokens(name):
    first, second = tensors(1, 2, 40), tensors(1, 2, 40, seed=1)
    mixed = [torch.where(torch.arange(40)[:, None] < 20, x, 3 * y) for x, y in zip(first, second, strict=True)]
    plans, outs = [], []
    for q, k, v in (first, mixed):
        plans.append(STRICT[name].plan(q, k, is_causal=True).to_dense())
        outs.append(coterie.attention(q, k, v, STRICT[name], is_causal=True))
    assert torch.equal(plans[0][:, :, :20], plans[1][:, :, :20])
    close(outs[0][:, :, :20], outs[1][:, :, :20])


@both
@says("A query grouped only with the future attends to itself.", page="guide/causality.md")
def test_a_query_grouped_with_the_future_alone_attends_to_itself():
    q, k, v = tensors(1, 1, 64)
    mechanism = coterie.Smyrf(rounds=1, cluster_size=4)
    met = mechanism.plan(q, k).to_dense()[0, 0].bool()
    place = torch.arange(64)
    lonely = ~(met & (place[None] <= place[:, None])).any(-1)
    assert lonely.any()
    out = coterie.attention(q, k, v, mechanism, is_causal=True)
    close(out[0, 0, lonely], v[0, 0, lonely])


@both
@says(
    "When Nq ≠ Nk, the default `causal_offset` is Nk − Nq: the last query lines up with the last key, as generation "
    "with a cache needs. SDPA's default is 0.",
    page="guide/causality.md",
)
def test_the_default_offset_is_bottom_right():
    q, k, v = tensors(1, 2, 7, 20)
    out = coterie.attention(q, k, v, "full", is_causal=True)
    allowed = torch.arange(20) <= torch.arange(7)[:, None] + 13
    close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(coterie.attention(q, k, v, "full", is_causal=True, causal_offset=0), theirs)


# --- masks of pairs --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["clustered", "clustered-euclidean", "improved", "improved-euclidean"])
@says(
    "A mean query has no row in a mask of pairs. `Clustered` and `ImprovedClustered` therefore take key masks and "
    "biases of keys only, and refuse other masks and `is_causal` by name."
)
def test_mean_queries_take_masks_of_keys_alone(name):
    q, k, v = tensors(2, 2, 30)
    mask = padding(2, 30, [30, 11], "right")
    by_mask = coterie.attention(q, k, v, MECHANISMS[name], attn_mask=mask[:, None, None])
    assert torch.equal(by_mask, coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask))
    bias = torch.linspace(-1, 1, 30, dtype=q.dtype).expand(2, 1, 1, 30)
    biased = coterie.attention(q, k, v, MECHANISMS[name], attn_mask=bias)
    assert not torch.equal(biased, coterie.attention(q, k, v, MECHANISMS[name]))
    for pairs in (torch.ones(30, 30, dtype=torch.bool), torch.zeros(2, 2, 30, 30, dtype=q.dtype)):
        with pytest.raises(ValueError, match="attn_mask: expected a mask of keys"):
            coterie.attention(q, k, v, MECHANISMS[name], attn_mask=pairs)
    with pytest.raises(ValueError, match="is_causal: expected False"):
        coterie.attention(q, k, v, MECHANISMS[name], is_causal=True)


@both
@says("A mean key has no column in one either: `NearFar` takes key masks only.")
def test_mean_keys_take_key_masks_alone():
    q, k, v = tensors(2, 2, 30)
    mask = padding(2, 30, [30, 11], "right")
    by_mask = coterie.attention(q, k, v, "near-far:near=4", attn_mask=mask[:, None, None])
    assert torch.equal(by_mask, coterie.attention(q, k, v, "near-far:near=4", key_mask=mask))
    for refused in (torch.ones(30, 30, dtype=torch.bool), torch.ones(2, 1, 1, 30, dtype=q.dtype)):
        with pytest.raises(ValueError, match="attn_mask: expected a key_mask"):
            coterie.attention(q, k, v, "near-far:near=4", attn_mask=refused)


@both
@pytest.mark.parametrize("name", ["smyrf", "reformer", "routing", "local", "topk"])
@says("A mask of pairs is looked up at the pairs that the plan names. It does not change who is grouped with whom.")
def test_a_mask_of_pairs_is_looked_up_at_the_pairs_of_the_plan(name):
    q, k, v = tensors(1, 2, 40)
    pairs = torch.rand(1, 2, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    out = coterie.attention(q, k, v, MECHANISMS[name], attn_mask=pairs)
    counts = MECHANISMS[name].plan(q, k).to_dense()
    weights = torch.where(pairs & (counts > 0), counts, 0).to(q.dtype).log()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=weights)
    close(out, want.nan_to_num(0))


@says(
    "A 2-D `attn_mask` is a key mask if its shape is (B, Nk), and a mask of pairs if it is (Nq, Nk). If B = Nq it "
    "could be either, so it is refused: pass four dimensions."
)
def test_a_mask_of_two_dimensions():
    q, k, v = tensors(2, 2, 5, 9, dtype=torch.float32)
    keys, pairs = padding(2, 9, [9, 4]), torch.ones(5, 9, dtype=torch.bool).tril(4)
    close(coterie.attention(q, k, v, "full", attn_mask=keys), coterie.attention(q, k, v, "full", key_mask=keys))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
    close(coterie.attention(q, k, v, "full", attn_mask=pairs), want)
    with pytest.raises(ValueError, match="attn_mask"):
        coterie.attention(q[:, :, :2], k, v, "full", attn_mask=keys)
    four = coterie.attention(q[:, :, :2], k, v, "full", attn_mask=keys[:, None, None])
    close(four, coterie.attention(q[:, :, :2], k, v, "full", key_mask=keys))
