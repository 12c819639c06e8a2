"""Other libraries take our models: PEFT and sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.__main__ import main
from d2l_bert.modeling.export import FLOAT, OnnxModel


pytestmark = pytest.mark.slow


def test_lora_on_the_attention_projections_trains_and_is_saved_without_the_model(trained, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=3)
    embedding = "bert.embeddings.word_embeddings.weight"
    frozen = base.state_dict()[embedding].clone()
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "key", "value", "output"])
    model = peft.get_peft_model(base, lora)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or ".classifier." in name for name in trainable)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trainable if "lora_" in name} == lora.target_modules
    batch = AutoTokenizer.from_pretrained(trained)(
        ["anna walked", "the old drum", "hugo left"], return_tensors="pt", padding=True
    )
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(**batch, labels=torch.tensor([0, 1, 2])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    expected = model.eval()(**batch).logits
    model.save_pretrained(tmp_path)
    again = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=3)
    assert torch.equal(again.state_dict()[embedding], frozen)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).logits, expected)
    torch.testing.assert_close(loaded.merge_and_unload()(**batch).logits, expected, atol=1e-5, rtol=1e-4)


def test_a_contrastive_stage_takes_its_dropout_at_loading_and_leaves_a_folder_for_embed_and_export(trained, tmp_path):
    """SimCSE: the two vectors of a text differ by dropout alone."""
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    texts = ["Anna walked to the garden.", "The drum was old and small and heavy.", "Hugo left.", "The tower was old."]
    model = SentenceTransformer(str(trained), config_kwargs={"hidden_dropout_prob": 0.1})
    before = model.encode(texts)
    inputs = model.train().preprocess(texts)
    first, second = (model(dict(inputs))["sentence_embedding"] for _ in range(2))
    assert (first - second).abs().amax(1).min() > 1e-3
    options = SentenceTransformerTrainingArguments(
        tmp_path / "stage", max_steps=3, learning_rate=1e-3, save_strategy="no", report_to="none", use_cpu=True
    )
    rows = Dataset.from_dict({"text": texts, "again": texts})
    SentenceTransformerTrainer(model, options, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)).train()
    vectors, stock, lines, output = (str(tmp_path / name) for name in ("vectors", "stock", "texts.txt", "found.npy"))
    model.save_pretrained(vectors)
    expected = SentenceTransformer(vectors, trust_remote_code=True).encode(texts)  # the code in the folder, too
    assert np.abs(expected - before).max() > 1e-3

    Path(lines).write_text("\n".join(texts) + "\n")
    assert main(["embed", vectors, lines, "--output", output]) == 0
    np.testing.assert_allclose(np.load(output), expected, atol=1e-5)
    assert main(["export", vectors, stock]) == 0
    np.testing.assert_allclose(SentenceTransformer(stock).encode(texts), expected, atol=1e-5)
    encoded = AutoTokenizer.from_pretrained(stock)(texts, padding=True, return_tensors="pt")
    found = OnnxModel(Path(stock, FLOAT), None)(**encoded)["last_hidden_state"]
    shares = encoded["attention_mask"] / encoded["attention_mask"].sum(1, keepdim=True)
    np.testing.assert_allclose(torch.einsum("bt,bth->bh", shares, found), expected, atol=1e-4)
