"""`d2l-bert export`: its files under stock Transformers, ONNX Runtime and transformers.js; published and loaded."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from local_hub import environment
from promises.driving import python
from publishing import published
from small_models import of_head
from transformers import AutoTokenizer, pipeline

import d2l_bert
from d2l_bert.__main__ import main
from d2l_bert.modeling.config import TASKS
from d2l_bert.modeling.export import read_for_task
from d2l_bert.records import read_record


FLOAT = "onnx/model.onnx"
INT8 = "onnx/model_quantized.onnx"
TEXTS = ["Anna walked to the garden.", "The drum was old and small and heavy. Then Hugo left."]
PROMPT = "Anna walked to the [MASK]."

# Where `make browsers` installs transformers.js.
NODE_MODULES = Path(__file__).parent.parent / "build/js/node_modules"
HAS_NODE = NODE_MODULES.is_dir() and shutil.which("node")
needs_node = pytest.mark.skipif(not HAS_NODE, reason="transformers.js or node is missing: make browsers")


def run_onnx(file, encoded):
    """The outputs of an ONNX file by plain ONNX Runtime, by name."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    given = {each.name: encoded[each.name].numpy() for each in session.get_inputs()}
    values = session.run(names, given)
    return dict(zip(names, map(torch.from_numpy, values), strict=True))


def export(source, target, *options):
    pytest.importorskip("onnxscript")
    assert main(["export", str(source), str(target), *options]) == 0
    return target


def saved(head, trained, folder, **options):
    """A model folder with the tokenizer of a run; the model, and the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = of_head(head, vocab_size=len(tokenizer), **options)
    for each in (model, tokenizer):
        each.save_pretrained(folder / "model")
    return folder / "model", model, tokenizer


@pytest.fixture(scope="module")
def filled(trained, tmp_path_factory):
    """The export of a finished run for fill-mask."""
    return export(trained, tmp_path_factory.mktemp("exported") / "stock")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_file_gives_the_outputs_of_the_model(task, trained, tmp_path):
    head = TASKS[task]
    source, model, tokenizer = saved(head, trained, tmp_path, embedding_layer_norm=True, max_position_embeddings=48)
    folder = export(source, tmp_path / "stock", *(["--task", task] if task == "feature-extraction" else []))
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == [f"Bert{head}"]
    stock = getattr(transformers, f"Bert{head}").from_pretrained(folder).eval()
    encoded = tokenizer(TEXTS, TEXTS[::-1], padding=True, return_tensors="pt")
    is_real = encoded["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**encoded)
        of_stock = stock(**encoded)
    in_float = run_onnx(folder / FLOAT, encoded)
    in_int8 = run_onnx(folder / INT8, encoded)
    assert list(in_float) == list(in_int8) == list(expected)
    for name in expected:
        place = is_real if expected[name].shape[:2] == is_real.shape else slice(None)
        values = expected[name][place]
        torch.testing.assert_close(of_stock[name][place], values, atol=1e-5, rtol=0)
        torch.testing.assert_close(in_float[name][place], values, atol=1e-4, rtol=0)
        error = (in_int8[name][place] - values).abs().mean()
        assert 0 < error < 0.2 * values.std()
    assert (folder / INT8).stat().st_size < (folder / FLOAT).stat().st_size


@pytest.mark.slow
def test_one_head_of_a_pretrained_model_is_exported_alone(trained, tmp_path):
    folder = export(trained, tmp_path / "nsp", "--task=next-sentence-prediction")
    assert read_record(folder / "config.json")["id2label"] == {"0": "IsNext", "1": "NotNext"}
    encoded = AutoTokenizer.from_pretrained(trained)(*TEXTS, return_tensors="pt")
    model = d2l_bert.D2lBertForNextSentencePrediction.from_pretrained(trained).eval()
    with torch.no_grad():
        expected = model(**encoded).logits
    torch.testing.assert_close(run_onnx(folder / FLOAT, encoded)["logits"], expected, atol=1e-4, rtol=0)
    card = (folder / "README.md").read_text()
    # The head that filled masks is not there.
    assert "widget" not in card and f"{(folder / INT8).stat().st_size:,}" in card


@pytest.mark.slow
def test_a_model_that_stock_bert_cannot_express_is_exported_as_onnx_alone(trained, tmp_path, fails):
    source, model, tokenizer = saved("ForMaskedLM", trained, tmp_path)
    assert "embedding_layer_norm" in fails("export", source, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()
    folder = export(source, tmp_path / "onnx", "--onnx_only")
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    is_real = encoded["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**encoded).logits[is_real]
    torch.testing.assert_close(run_onnx(folder / FLOAT, encoded)["logits"][is_real], expected, atol=1e-4, rtol=0)
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize("head, task", [("ForPreTraining", ["--task=text-classification"]), ("ForMultipleChoice", [])])
def test_a_model_without_the_head_of_a_task_is_refused_with_a_task_that_it_has(head, task, trained, tmp_path, fails):
    pytest.importorskip("onnx")
    source, model, _ = saved(head, trained, tmp_path)
    said = fails("export", source, tmp_path / "out", *task)
    assert type(model).__name__ in said
    assert "cannot be loaded" not in said
    assert not (tmp_path / "out").exists()
    (named,) = re.findall(r"--task ([a-z-]+)", said)
    assert read_for_task(str(source), named)[-1] == named


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT is an output like any other


@pytest.mark.slow
def test_a_model_converted_to_stock_bert_keeps_its_card_and_is_published(trained, tmp_path, capsys):
    folder = tmp_path / "stock"
    card = Path(shutil.copytree(trained, tmp_path / "run"), "README.md")
    card.write_text(card.read_text().replace("---\n", "---\nlanguage: de\n", 1))
    assert main(["convert", str(card.parent), str(folder), "--to", "bert"]) == 0
    for file in ("run_config.json", "metrics.json", "training_curves.png"):
        assert (folder / file).read_bytes() == (trained / file).read_bytes()
    card = (folder / "README.md").read_text()
    assert (
        "license: apache-2.0" in card
        and "language: de" in card
        and "trust_remote_code" not in card
        and "import d2l_bert" not in card
    )
    block = card.split("```python\n")[1].split("```")[0]
    assert "d2l_bert" not in block and f'model="{folder.name}"' in block
    assert main(["publish", str(folder), "me/stock", "--dry_run"]) == 0
    assert main(["fill-mask", str(folder), PROMPT]) == 0
    assert "model.safetensors" in capsys.readouterr().out


LOAD = """
import json, sys
sys.modules["d2l_bert"] = None  # importing it now fails
from transformers import pipeline
fill = pipeline("fill-mask", model="someone/stock")
print(json.dumps([type(fill.model).__module__, fill("Anna walked to the [MASK].")]))
"""

NODE = """
import { env, pipeline } from "@huggingface/transformers";
const [place, name, task, text, cache] = JSON.parse(process.argv[2]);
env.remoteHost = place;
env.cacheDir = cache;
const predict = await pipeline(task, name, { dtype: "fp32" });
console.log(JSON.stringify(await predict(text)));
"""


def in_node(place, name, task, text, tmp_path):
    """What a pipeline of transformers.js returns, in Node; its requests can reach this machine alone."""
    script = tmp_path / "script.mjs"
    script.write_text(NODE)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    words = ["node", str(script), json.dumps([place, name, task, text, str(tmp_path / "cache")])]
    unreachable = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **unreachable})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_published_export_is_loaded_by_stock_transformers_alone_and_by_transformers_js(here, filled, tmp_path):
    assert main(["publish", str(filled), "someone/stock", "--public"]) == 0
    files = published(here, "someone/stock")
    assert {FLOAT, INT8, "model.safetensors"} <= files.keys()
    assert 'await pipeline("fill-mask", "someone/stock"' in files["README.md"].decode()
    done = python(LOAD, environment(here, tmp_path / "home", None))
    assert done.returncode == 0, done.stderr
    module, of_stock = json.loads(done.stdout.splitlines()[-1])
    assert module == "transformers.models.bert.modeling_bert"
    expected = pipeline("fill-mask", model=str(filled))(PROMPT)
    in_js = in_node(here.endpoint, "someone/stock", "fill-mask", PROMPT, tmp_path) if HAS_NODE else of_stock
    for found, tolerance in ((of_stock, 1e-6), (in_js, 1e-3)):
        assert [guess["token_str"] for guess in found] == [guess["token_str"] for guess in expected]
        np.testing.assert_allclose([g["score"] for g in found], [g["score"] for g in expected], atol=tolerance)


@pytest.mark.slow
def test_onnx_files_of_other_weights_are_not_published(filled, trained, tmp_path, fails):
    folder = Path(shutil.copytree(filled, tmp_path / "stock"))
    model = transformers.BertForPreTraining.from_pretrained(folder)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.mul_(1.1)
    model.save_pretrained(folder)
    assert FLOAT in fails("publish", folder, "me/stock", "--dry_run")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no ONNX", "the file of another model"])
def test_a_damaged_file_in_int8_is_not_published(damage, filled, trained, tmp_path, fails):
    folder = Path(shutil.copytree(filled, tmp_path / "stock"))
    if damage == "no ONNX":
        (folder / INT8).write_bytes(b"garbage")
    else:
        source, other, _ = saved("ForMaskedLM", trained, tmp_path, embedding_layer_norm=True)
        with torch.no_grad():
            other.bert.embeddings.word_embeddings.weight.mul_(3)
        other.save_pretrained(source)
        shutil.copy(export(source, tmp_path / "exported") / INT8, folder / INT8)
    assert INT8 in fails("publish", folder, "me/stock", "--dry_run")
