"""Publishing on a Hub: what is sent and what stands there afterwards, also by a run; folders that are refused."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import MODEL_FILES, SMALL
from huggingface_hub import constants
from local_hub import TOKEN, environment
from promises.driving import python
from publishing import change_card, change_json, published
from safetensors.torch import load_file, save_file
from transformers import AutoModelForPreTraining, AutoTokenizer, BertConfig, BertModel

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards.checks import local_pictures, refuse_paths
from d2l_bert.model_cards.markdown import cell
from d2l_bert.model_cards.publish import hub_errors
from d2l_bert.modeling.conversion import save_model
from d2l_bert.tokenization.wordpiece import save_tokenizer


@pytest.mark.slow
def test_no_weights_or_metrics_of_an_earlier_commit_remain_beside_the_new_ones(here, trained, folder):
    for _ in range(2):  # a name without an owner is under the token's account; the same files make no second commit
        assert main(["publish", str(trained), "bert"]) == 0
    assert len(here.commits("someone/bert")) == 2
    assert len(here.tags("someone/bert")) == 1
    (folder / "model.safetensors").unlink()
    D2lBertForPreTraining.from_pretrained(trained).save_pretrained(folder, max_shard_size="50KB")
    for name in ("metrics.json", "README.md"):
        (folder / name).unlink()
    (folder / "plot.png").write_bytes(b"one that the card may show")
    assert main(["publish", str(folder), "someone/bert"]) == 0
    (folder / "plot.png").unlink()
    assert main(["publish", str(folder), "someone/bert"]) == 0
    files = published(here)
    assert "model-00001-of-00002.safetensors" in files and "plot.png" in files
    assert "model.safetensors" not in files and "metrics.json" not in files


@pytest.mark.slow
def test_branch_message_and_pull_request_are_used(here, trained, capsys):
    publish = ["publish", str(trained), "someone/bert"]
    assert main([*publish, "--revision=trial", "--commit_message=Try it"]) == 0
    assert published(here, revision="trial").keys() == MODEL_FILES and not published(here)
    assert here.repositories["someone/bert"].at("trial").title == "Try it"
    assert list(here.tags("someone/bert").values()) == [here.branches("someone/bert")["trial"]]
    capsys.readouterr()
    assert main([*publish, "--create_pr", "--license=mit"]) == 0
    assert f"{here.endpoint}/someone/bert/discussions/1" in capsys.readouterr().out
    assert published(here, revision="refs/pr/1").keys() == MODEL_FILES and not published(here)
    assert len(here.tags("someone/bert")) == 1 and here.is_private("someone/bert")
    assert main([*publish, "--create_pr", "--revision=none"]) == 2
    said = capsys.readouterr().err
    assert "404 Invalid rev id" in said
    assert said.count("\n") == 1
    assert here.branches("someone/bert").keys() == {
        "main",
        "trial",
    }


def test_a_stock_bert_with_a_padded_vocabulary_and_its_pooling_is_published(here, trained, tmp_path, capsys):
    """Many BERTs have more entries than their tokenizer, and a sentence-transformers model has modules beside it."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    folder = tmp_path / "stock"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer) + 7, **sizes)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    modules = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"}
    for name in modules:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    assert main(["publish", str(folder), "someone/stock", "--license=mit"]) == 0
    assert published(here, "someone/stock").keys() - MODEL_FILES == modules
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    assert main(["publish", str(folder), "someone/stock", "--license=mit"]) == 2
    assert "2_Dense/pytorch_model.bin" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_was_downloaded_is_published_under_its_new_name(here, trained, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    for name, content in published(here).items():
        (tmp_path / name).write_bytes(content)
    card = tmp_path / "README.md"
    card.write_text(card.read_text() + '\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert main(["publish", str(tmp_path), "someone/other"]) == 0
    (tag,) = here.tags("someone/other")
    text = published(here, "someone/other")["README.md"].decode()
    assert text.count(f'from_pretrained("someone/other", revision="{tag}", trust_remote_code=True') == 1
    assert text.endswith('\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert 'from_pretrained("someone/bert"' not in text and 'model="someone/bert"' not in text


@pytest.mark.slow
def test_paths_of_the_start_model_and_the_tokenizer_are_sent_as_names(here, trained, books, tmp_path, monkeypatch):
    out = tmp_path / "further"
    monkeypatch.chdir(trained.parent.parent)
    start = f"{trained.parent.name}/model"
    options = ["--max_steps=2", "--mixed_precision=no", "--max_seq_length=48", "--global_batch_size=8"]
    options += ["--license=mit", "--dataloader_num_workers=0", f"--tokenizer={trained}", f"--init_from={start}"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *options]) == 0
    assert main(["publish", str(out), "someone/bert"]) == 0
    record = json.loads(published(here)["run_config.json"])
    assert record["run"]["init_from"] == record["run"]["tokenizer"] == "model"
    assert [read["name"] for read in record["fingerprints"]] == ["books", "model", "model"]
    assert all(re.fullmatch("[0-9a-f]{16}", read["fingerprint"]) for read in record["fingerprints"])
    card = published(here)["README.md"].decode()
    assert "pretrained further from model on books" in card and "base_model" not in card and str(tmp_path) not in card


@pytest.mark.slow
def test_the_cards_examples_run_as_written_and_pin_the_revision_of_code(here, trained, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    card = published(here)["README.md"].decode()
    (tag,) = here.tags("someone/bert")
    filling, tuning = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert tuning.count(f'from_pretrained("someone/bert", revision="{tag}", trust_remote_code=True') == 1
    code = f"""
import sys
sys.modules["d2l_bert"] = None  # importing it now fails
{filling}
assert len(fill("Anna walked to the [MASK].")) == 5
{tuning}
assert type(model).__name__ == "D2lBertForSequenceClassification"
"""
    with_package = "import d2l_bert\n" + filling.replace(f', revision="{tag}", trust_remote_code=True', "")
    for program in (code, with_package):
        process = python(program, environment(here, tmp_path / "home", TOKEN))
        assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the name of the folder


def test_errors_of_our_own_are_not_reported_as_the_hubs():
    with pytest.raises(RuntimeError, match="ours"), hub_errors("someone/bert"):
        raise RuntimeError("a mistake of ours")
    with pytest.raises(ValueError, match="client has been closed.*the same command completes the upload"):
        with hub_errors("someone/bert"):  # when one thread of the client fails, the others find it closed
            raise RuntimeError("Error while uploading 'x' to the Hub.") from RuntimeError("client has been closed")


# ---------------------------------------------------------------------------------------------------------------------
# Runs that publish their models


def pretrain(books, out, *options):
    arguments = [f"--corpus={books}", f"--output_dir={out}", "--max_steps=40", "--save_steps=10", *SMALL]
    options = ["--mixed_precision=no", "--license=apache-2.0", "--push_to_hub", *options]
    return main(["pretrain", *arguments, *options])


@pytest.mark.slow
def test_models_saved_by_words_go_to_branches_of_their_names_with_cards_of_their_own(here, trained, books, tmp_path):
    """Of a run that saves after 600 and 1,001 words and then publishes them; it trains as one that does not."""
    out = tmp_path / "bert"
    assert pretrain(books, out, "--save_words", "600", "1_001", "--hub_private_repo=false") == 0
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert list(here.branches("someone/bert")) == ["main", "chck_1001", "chck_600"]
    assert published(here).keys() == MODEL_FILES and not here.is_private("someone/bert")
    for words in (600, 1001):
        branch = f"chck_{words}"
        files = published(here, revision=branch)
        assert files.keys() == MODEL_FILES - {"metrics.json", "training_curves.png"}
        assert files["model.safetensors"] == (out / branch / "model.safetensors").read_bytes()
        record = json.loads(files["run_config.json"])
        assert record["run"]["corpus"] == ["books"] and record["checkpoint_words"] == words
        step = record["checkpoint_step"]
        card = files["README.md"].decode()
        assert 'from_pretrained("someone/bert", revision="model-' in card
        assert "license: apache-2.0" in card and "MLM loss" not in card and "Reproduce" not in card
        assert f"taken after {words:,} words of text, which is {step} steps of a run of 40" in card
        assert card.count("# bert\n") == 1 and f"| steps | {step} of 40 of 8 pairs |" in card


@pytest.mark.slow
def test_a_hub_that_stops_answering_costs_no_training_and_is_reported(here, books, tmp_path, capsys):
    here.fail = lambda method, path: here.stop() or 0 if "/preupload/" in path else None
    out = tmp_path / "bert"
    assert pretrain(books, out, "--hub_private_repo=false") == 2
    said = capsys.readouterr().err
    assert f"the model is complete in {out}, and d2l-bert publish {out} bert --public sends it" in said
    assert MODEL_FILES <= {path.name for path in out.iterdir()} and here.is_private("someone/bert")
    here.fail = None
    here.start()
    assert main(["publish", str(out), "bert", "--public"]) == 0
    assert not here.is_private("someone/bert")
    assert published(here)["model.safetensors"] == (out / "model.safetensors").read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# Models that are refused before anything is sent: damaged folders, wrong names, wrong tokens


def cut(file, share):
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def name_of_positions(weights):
    return next(name for name in weights if "position" in name)


# What the folder's files hold wrongly, and what the error line names. tests/promises has more.
BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "a pickle instead": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "no file named model.safetensors",
    ),
    "a weight gone": (lambda f: change_weights(f, lambda w: w.pop(name_of_positions(w))), "(bert."),
    "a weight too many": (
        lambda f: change_weights(f, lambda w: w.update({"bert.extra.weight": torch.ones(2)})),
        "bert.extra.weight",
    ),
    "a weight not finite": (
        lambda f: change_weights(f, lambda w: w[name_of_positions(w)].fill_(torch.nan)),
        "not finite",
    ),
    "a vocabulary of another size": (lambda f: change_json(f / "config.json", vocab_size=500), "the shape"),
    "another padding": (lambda f: change_json(f / "config.json", pad_token_id=3), "not that of the model, 3"),
    "a damaged tokenizer": (lambda f: cut(f / "tokenizer.json", 0.5), "tokenizer cannot be loaded"),
    "a tokenizer of Transformers 5 alone": (
        lambda f: change_json(f / "tokenizer_config.json", tokenizer_class="TokenizersBackend"),
        "(TokenizersBackend;",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json: is missing, or names no model"),
    "a damaged configuration": (lambda f: cut(f / "config.json", 0.5), "config.json: cannot be read"),
    "another kind of model": (lambda f: change_json(f / "config.json", model_type="roberta"), "names a roberta model"),
    "stock BERT with a class of ours": (lambda f: change_json(f / "config.json", model_type="bert"), "config.json"),
    "an unknown class": (lambda f: change_json(f / "config.json", architectures=["D2lBertForX"]), "D2lBertForX"),
    "a class that is no name": (lambda f: change_json(f / "config.json", architectures=[3]), "config.json"),
    "no size of the vocabulary": (lambda f: change_json(f / "config.json", vocab_size=None), "vocab_size"),
    "labels that are a number": (lambda f: change_json(f / "config.json", id2label=3), "config.json"),
    "classes that the Hub cannot find": (
        lambda f: change_json(f / "config.json", auto_map={"AutoConfig": "configuration_d2l_bert.D2lBertConfig"}),
        "lacks classes in auto_map",
    ),
    "no code": (lambda f: (f / "modeling_d2l_bert.py").unlink(), "modeling_d2l_bert.py is missing"),
    "other code for the configuration": (
        lambda f: (f / "configuration_d2l_bert.py").write_bytes((f / "configuration_d2l_bert.py").read_bytes()[:-1]),
        "configuration_d2l_bert.py is missing, or is not that of the installed",
    ),
    "no metadata": (lambda f: (f / "README.md").write_text("# A model\n"), "has no licence"),
    "invalid YAML": (lambda f: change_card(f, "license: apache", "license: [apache"), "README.md: cannot be read"),
    "a card that is no text": (
        lambda f: (f / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff"),
        "README.md: cannot be read",
    ),
    "a loss that is no number": (lambda f: change_json(f / "metrics.json", eval_mlm_loss="low"), "metrics.json"),
    "endless brackets": (lambda f: (f / "metrics.json").write_text("[" * 100_000), "metrics.json: cannot be read"),
    "figures in a list": (lambda f: (f / "metrics.json").write_text("[1]"), "it holds no JSON object"),
    "a damaged record": (lambda f: cut(f / "run_config.json", 0.5), "run_config.json: cannot be read"),
    "full paths in the record": (
        lambda f: change_json(f / "run_config.json", local_paths={str(Path.home() / "texts"): {"name": "texts"}}),
        "run_config.json: names a folder of this machine",
    ),
    "somebody's home": (
        lambda f: (f / "README.md").open("a").write("Trained in /home/jane/texts.\n"),
        "names a folder of this machine (/home/jane)",
    ),
    "a path in the licence": (
        lambda f: (f / "LICENSE").write_text(f"As in {Path.home()}/x"),
        "LICENSE: names a folder of this machine",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_folder_is_refused_in_one_line_before_anything_is_sent(here, folder, how, capsys):
    breaks, words = BROKEN[how]
    breaks(folder)
    capsys.readouterr()
    assert main(["publish", str(folder), "someone/bert"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("d2l-bert publish: error: ") and said.err.count("\n") == 1 and not said.out
    assert words in said.err and str(folder) in said.err and ";" in said.err, said.err
    assert not here.requests and not here.repositories


def test_a_folder_with_the_code_of_an_earlier_version_is_published_once_it_is_saved_again(here, folder, capsys):
    code = folder / "modeling_d2l_bert.py"
    of_today = code.read_text()
    code.write_text(of_today.replace("mean", "average"))
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 2
    save_model(AutoModelForPreTraining.from_pretrained(str(folder)), str(folder))
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 0
    assert code.read_text() == of_today


PATHS = [
    *(
        "/root/x",
        "in /root.",
        "/cluster/home/bob",
        '"/scratch"',
        "/scratch/bob",
        "/mnt/data",
        "/mnt/data/x",
        "/srv/x/ds",
    ),
    *(
        "/home/bob",
        "/Users/ann/x",
        "/net/home/bob",
        "/gpfs/u/bob",
        "/data/bob/x",
        "/tmp/x/y",
        "/content/drive/MyDrive",
    ),
    *("C:\\Users\\bob", "c:\\data\\x", "D:/data/x", "\\\\server\\share", "file:///home/x", "file:///data"),
    *("~/models/x", "~bob/x", "host:/data/bob", "(/data/bob)", "--corpus=/data/bob", "`/data/bob`", "/Größe/x"),
    *("/Volumes/Disk/x", "/private/var/folders/ab", "/opt/home/bob", "/lustre", "/a b: /data/bob"),
]
NO_PATHS = [
    *(
        "and/or",
        "he/she",
        "TCP/IP",
        "N/A",
        "km/h",
        "w/o",
        "12/24/2024",
        "1/2/3",
        "a / b / c",
        "24/7",
        "s/foo/bar/",
        "/help",
    ),
    *(
        "/v1/api",
        "POST /v1/chat/completions",
        "/api/models/x",
        "https://a.b/home/x/y",
        "http://host:80/a/b",
        "org/model/x",
    ),
    *(
        "/usr/bin/env",
        "/etc/hosts",
        "/dev/null",
        "/path/to/model",
        "../x/y",
        "./x/y",
        "~/.cache/x",
        "**/a/b",
        "</td></tr>",
    ),
    *(
        "[x](/foo/bar)",
        'src="/a/b/c"',
        "note: it's",
        "x:y",
        "$\\\\alpha$",
        "\\alpha\\beta",
        "//",
        "https://huggingface.co/root/x",
    ),
]


@pytest.mark.parametrize("text", PATHS)
def test_a_path_of_a_machine_is_found_in_all_its_spellings(tmp_path, text):
    """In Markdown as it is, in its escapes, as code and in the metadata; in JSON as a text or as a name."""
    for shown in (text, cell(text), f"x `{text}` y", f"---\nname: {json.dumps(text, ensure_ascii=False)}\n---\n"):
        (tmp_path / "README.md").write_text(f"Made of {shown}")
        with pytest.raises(UserError, match="names a folder of this machine"):
            refuse_paths(tmp_path, tmp_path / "README.md")
    for content in ({"a": [text]}, {text: 1}, {"a": f"see {text}"}):
        (tmp_path / "metrics.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="names a folder of this machine"):
            refuse_paths(tmp_path, tmp_path / "metrics.json")


def test_what_only_looks_like_a_path_is_published(tmp_path):
    (tmp_path / "README.md").write_text("\n\n".join(NO_PATHS))
    (tmp_path / "metrics.json").write_text(json.dumps(NO_PATHS))
    for name in ("README.md", "metrics.json"):
        refuse_paths(tmp_path, tmp_path / name)


def test_a_class_may_look_like_a_path_but_not_like_that_of_a_machine(tmp_path):
    for name, is_refused in (("/people/person/place_of_birth", False), ("/home/bob/x", True)):
        (tmp_path / "README.md").write_text(f"| `{name}` | {cell(name)} |")
        with pytest.raises(UserError) if is_refused else contextlib.nullcontext():
            refuse_paths(tmp_path, tmp_path / "README.md", [name])


def test_the_pictures_of_a_card_are_found_as_markdown_reads_them():
    shown = [
        *(
            "![Confusion matrix on te[1](2).csv](a.png)",
            "![a\\[b](x%5B1%5D.png)",
            "![](<a b.png>)",
            '![t](a(1).png "t")',
        ),
        "![a\nb](c.png)",
    ]
    hidden = [
        "`![n](n.png)`",
        "``![n`n](n.png)``",
        "```\n![n](n.png)\n```",
        "![t](https://x.y/z.png)",
        "\\![l](l.png)",
    ]
    assert local_pictures("\n\n".join([*shown, *hidden])) == ["a.png", "x[1].png", "a b.png", "a(1).png", "c.png"]


@pytest.mark.parametrize(
    ("token", "repo_id"), [(None, "someone/bert"), ("hf_unknown", "someone/bert"), (TOKEN, "another/bert")]
)
def test_missing_or_wrong_tokens_are_refused_in_one_line(here, trained, monkeypatch, capsys, token, repo_id):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert main(["publish", str(trained), repo_id]) == 2
    said = capsys.readouterr().err
    assert "log in with `hf auth login`" in said and said.count("\n") == 1 and not here.repositories


def test_a_dry_run_lists_the_files_before_it_says_what_is_missing(here, folder, capsys):
    change_card(folder, "license: apache-2.0\n", "")
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 2
    said = capsys.readouterr()
    assert "model.safetensors" in said.out and "stays here: checkpoint-20" in said.out
    assert "has no licence" in said.err and said.err.count("\n") == 1 and not here.requests
