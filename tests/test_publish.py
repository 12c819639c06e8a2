"""From a model folder to a Hub and back: what is refused, what is sent, and how readers load it."""

import copy
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from local_hub import TOKEN, environment
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertForSequenceClassification
from d2l_bert.cli import main
from d2l_bert.model_cards.publish import hub_errors, without_paths
from d2l_bert.modeling.saving import AUTO_MAP


SENT = {
    *("README.md", "config.json", "configuration_d2l_bert.py", "metrics.json", "model.safetensors"),
    *("modeling_d2l_bert.py", "run_config.json", "tokenizer.json", "tokenizer_config.json", "training_curves.png"),
    "vocab.txt",
}
TEXT = "Anna walked to the [MASK]."


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of a finished run's folder, to be broken."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


def published(hub, repo_id="someone/bert", revision="main"):
    """The files there, without what the Hub puts into every repository."""
    files = hub.files(repo_id, revision)
    return {name: content for name, content in files.items() if name != ".gitattributes"}


def run(code, hub, home, token=None, **variables):
    """Python in a process of its own, with nothing in its cache but what `home` holds."""
    variables = {**environment(hub, home, token), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


# ---------------------------------------------------------------------------------------------------------------------
# There and back

LOAD = """
import sys
if {remote}:
    sys.modules["d2l_bert"] = None  # importing it now fails
else:
    import d2l_bert
import torch
from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, AutoTokenizer, pipeline
tensors = {{}}
for revision in {revisions!r}:
    options = dict(trust_remote_code={remote}, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained("someone/bert", **options)
    encoded = tokenizer({text!r}, return_tensors="pt")
    for auto in (AutoModelForMaskedLM, AutoModelForNextSentencePrediction):
        model = auto.from_pretrained("someone/bert", **options).eval()
        assert type(model).__module__.startswith("transformers_modules" if {remote} else "d2l_bert.")
        with torch.no_grad():
            tensors[f"{{revision}} {{auto.__name__}}"] = model(**encoded).logits
    fill = pipeline("fill-mask", model="someone/bert", **options)
    tensors[f"{{revision}} fill"] = torch.tensor([row["score"] for row in fill({text!r})])
torch.save(tensors, {result!r})
"""


def logits(name, **options):
    model = D2lBertForMaskedLM.from_pretrained(name, **options).eval()
    with torch.no_grad():
        return model(**AutoTokenizer.from_pretrained(name, **options)(TEXT, return_tensors="pt")).logits


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True], ids=["with the package", "with its published code alone"])
def test_readers_get_the_very_logits_fresh_pinned_and_offline(here, trained, tmp_path, remote, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    ((tag, commit),) = here.tags("someone/bert").items()
    assert commit == here.commits("someone/bert")[0]
    revisions, result = [None, tag, commit], tmp_path / "tensors.pt"
    code = LOAD.format(remote=remote, revisions=revisions, text=TEXT, result=str(result))
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        process = run(code, here, tmp_path / "home", TOKEN, **variables)
        assert process.returncode == 0, process.stderr
        tensors = torch.load(result, weights_only=True)
        assert len(tensors) == 9
        for revision in revisions:
            assert torch.equal(tensors[f"{revision} AutoModelForMaskedLM"], logits(trained)), revision
        result.unlink()
        here.stop()


def test_what_it_prints_is_the_page_and_three_lines_that_load_the_model(here, trained, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"published: {here.endpoint}/someone/bert (private)") and len(lines) == 3
    process = run("\n".join(map(str.strip, lines)) + "\nprint(type(model).__name__)", here, tmp_path, TOKEN)
    assert (process.returncode, process.stdout.split()) == (0, ["D2lBertForMaskedLM"]), process.stderr


def test_a_snapshot_and_the_hf_command_get_every_byte(here, trained, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    code = f"""
from huggingface_hub import snapshot_download
snapshot_download("someone/bert", local_dir={str(tmp_path / "snapshot")!r})
import sys
from huggingface_hub.cli.hf import main
sys.argv = ["hf", "download", "someone/bert", "--local-dir", {str(tmp_path / "hf")!r}]
main()
"""
    run(code, here, tmp_path / "home", TOKEN)
    for way in ("snapshot", "hf"):
        for name, content in published(here).items():
            assert (tmp_path / way / name).read_bytes() == content, (way, name)


def test_a_second_model_is_a_second_commit_and_the_first_stays_where_it_was_pinned(here, folder, tmp_path):
    before = logits(folder)
    assert main(["publish", str(folder), "someone/bert"]) == 0
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    save_file({**weights, name: 2 * weights[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["publish", str(folder), "someone/bert", "--commit_message", "Twice as long"]) == 0
    first, second = here.tags("someone/bert")
    newest, older, _ = here.commits("someone/bert")
    assert here.tags("someone/bert") == {first: older, second: newest}
    assert torch.equal(logits("someone/bert", revision=first, cache_dir=tmp_path / "1"), before)
    assert torch.equal(logits("someone/bert", cache_dir=tmp_path / "2"), logits(folder))
    assert not torch.equal(logits(folder), before)


def test_no_weights_or_figures_of_an_earlier_commit_stay_beside_the_new_ones(here, trained, folder, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    model = D2lBertForPreTraining.from_pretrained(trained)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight *= 2
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    for name in ("metrics.json", "README.md"):
        (folder / name).unlink()
    (folder / "plot.png").write_bytes(b"one that the card may show")
    assert main(["publish", str(folder), "someone/bert"]) == 0
    (folder / "plot.png").unlink()
    assert main(["publish", str(folder), "someone/bert"]) == 0
    files = published(here)
    assert "model-00001-of-00002.safetensors" in files and "plot.png" in files
    assert "model.safetensors" not in files and "metrics.json" not in files
    assert torch.equal(logits("someone/bert", cache_dir=tmp_path / "cache"), logits(folder))
    assert not torch.equal(logits(folder), logits(trained))


def test_the_same_folder_again_is_no_new_commit(here, trained):
    for _ in range(2):
        assert main(["publish", str(trained), "bert"]) == 0  # a name alone is under the token's account
    assert len(here.commits("someone/bert")) == 2 and len(here.tags("someone/bert")) == 1


@pytest.mark.slow
def test_a_private_model_is_found_by_its_owner_alone(here, trained, tmp_path, monkeypatch, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    assert here.is_private("someone/bert")
    code = """
from d2l_bert.cli import main
code = main(["fill-mask", "someone/bert", "A [MASK]."])
from transformers import AutoModel
try:
    AutoModel.from_pretrained("someone/bert", trust_remote_code=True)
except OSError as error:
    print(code, error)
"""
    for token in (None, "hf_made_up_for_another"):
        process = run(code, here, tmp_path / "home", token)
        assert process.stdout.startswith("2 ") and "private repository" in process.stdout, process.stderr
        assert len(process.stderr.splitlines()) == 1 and "log in with `hf auth login`" in process.stderr


def test_a_repository_is_private_unless_public_is_said_and_stays_as_it_is(here, trained):
    publish = ["publish", str(trained), "someone/bert"]
    for options, is_private in (([], True), (["--public"], False), ([], False)):
        assert main([*publish, *options]) == 0
        assert here.is_private("someone/bert") == is_private
    assert len(here.commits("someone/bert")) == 2


def fail_from(hub, number, failure):
    """Have the Hub fail from this request on: a status, "dead" or "no answer" (it serves the request all the same)."""
    requests = itertools.count(1)

    def fail(method, path):
        if next(requests) < number:
            return None
        if failure == "dead":
            hub.stop()
            return 0
        return {"no answer": -1}.get(failure, failure)

    hub.fail = fail


@pytest.mark.parametrize(
    ("failure", "exists"),
    [
        *((403, exists) for exists in (False, True)),
        *(
            pytest.param(failure, exists, marks=pytest.mark.slow)
            for failure in (500, "dead", "no answer")
            for exists in (False, True)
        ),
    ],
)
def test_nothing_is_public_before_the_new_commit_wherever_publishing_fails(here, folder, capsys, failure, exists):
    publish = ["publish", str(folder), "someone/bert", "--public", "--collection=My models", "--revision=trial"]
    if exists:
        assert main([*publish[:3], "--license=mit", "--revision=trial"]) == 0
    before = copy.deepcopy(here.repositories)
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, folder / "model.safetensors")

    def start_again():
        here.repositories, here.fail = copy.deepcopy(before), None
        here.collections.clear()

    def is_there():
        """Whether the new commit is there."""
        branches = here.branches("someone/bert") if here.repositories else {}
        files = here.files("someone/bert", "trial") if "trial" in branches else {}
        return files.get("model.safetensors") == (folder / "model.safetensors").read_bytes()

    def is_open():
        return bool(here.repositories) and not here.is_private("someone/bert")

    for _ in range(2):  # in a process's first run the client asks once who has started it
        start_again()
        here.requests.clear()
        assert main(publish) == 0 and is_there() and is_open()
    requests = [(request.method, request.path) for request in here.requests]
    for number in range(1, len(requests) + 1):  # the failing requests are this one and all after it
        start_again()
        fail_from(here, number, failure)
        capsys.readouterr()
        assert main(publish) == 2, requests[number - 1]
        assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("d2l-bert")]) == 1
        assert is_there() or not is_open(), requests[number - 1]
        here.fail = None
        if failure == "dead":
            here.start()
        assert main(publish) == 0 and is_there() and is_open(), requests[number - 1]


def test_what_was_private_before_is_said_before_anything_is_changed(here, trained, capsys):
    publish, said = ["publish", str(trained), "someone/bert"], []
    words = "someone/bert is private: it is made public when the model is there, and its earlier commits will be seen"
    warns = []
    for options in ([], ["--public"], ["--public"]):
        capsys.readouterr()
        here.fail = lambda method, path: said.append(capsys.readouterr().err) if path == "/api/repos/create" else None
        assert main([*publish, *options]) == 0
        here.fail = None
        warns.append(words in said.pop())
        assert words not in capsys.readouterr().err and not said
    assert warns == [False, True, False]
    capsys.readouterr()
    assert main(["publish", str(trained), "someone/new", "--public"]) == 0
    assert "earlier commits" not in capsys.readouterr().err


def test_a_dry_run_says_what_will_be_seen_and_changes_nothing(here, trained, monkeypatch, capsys):
    publish = ["publish", str(trained), "bert", "--public", "--dry_run"]

    def says():
        capsys.readouterr()
        here.requests.clear()
        assert main(publish) == 0
        assert {request.method for request in here.requests} <= {"GET"}
        return capsys.readouterr().err

    assert says() == "" and not here.repositories
    assert main(publish[:3]) == 0
    assert "someone/bert is private: it is made public when the model is there" in says()
    assert main(publish[:4]) == 0
    assert says() == ""
    unasked = "the Hub could not be asked: if bert exists and is private, its earlier commits will be seen"
    here.stop()
    assert unasked in says()
    here.start()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    assert unasked in says()


def test_a_pull_request_makes_nothing_public(here, trained, capsys):
    for dry_run in ([], ["--dry_run"]):
        assert main(["publish", str(trained), "someone/bert", "--create_pr", "--public", *dry_run]) == 2
        said = capsys.readouterr().err
        assert "makes no repository public; leave public out" in said and said.count("\n") == 1
    assert not here.requests
    assert main(["publish", str(trained), "someone/bert", "--create_pr"]) == 0
    assert here.is_private("someone/bert")


def test_a_branch_a_message_a_pull_request_and_a_collection(here, trained, folder, capsys):
    publish = ["publish", str(trained), "someone/bert"]
    assert main([*publish, "--revision=trial", "--commit_message=Try it", "--collection=My models"]) == 0
    assert published(here, revision="trial").keys() == SENT and not published(here)
    assert here.repositories["model", "someone/bert"].at("trial").title == "Try it"
    (tag,) = here.tags("someone/bert")
    assert here.tags("someone/bert")[tag] == here.branches("someone/bert")["trial"]
    (collection,) = here.collections.values()
    assert collection["title"] == "My models" and collection["private"]
    assert [item["id"] for item in collection["items"]] == ["someone/bert"]
    assert main([*publish[:2], "someone/other", f"--collection={collection['slug']}"]) == 0
    assert [item["id"] for item in here.collections[collection["slug"]]["items"]] == ["someone/bert", "someone/other"]
    capsys.readouterr()
    assert main([*publish, "--create_pr", "--license=mit"]) == 0
    assert f"{here.endpoint}/someone/bert/discussions/1" in capsys.readouterr().out
    assert published(here, revision="refs/pr/1").keys() == SENT and not published(here)
    assert list(here.tags("someone/bert")) == [tag]
    assert main([*publish, "--create_pr", "--license=isc", "--revision=trial"]) == 0
    assert here.branches("someone/bert").keys() == {"main", "trial"}
    assert published(here, revision="refs/pr/2").keys() == SENT


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


def test_all_that_is_sent_is_on_the_list_and_listed_by_a_dry_run(here, folder, capsys):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "notes.txt").write_text("mine")
    (folder / "secret.png").symlink_to("/etc/hostname")
    (folder / "1_Pooling").mkdir()
    also = {"LICENSE", "1_Pooling/config.json", "plot.svg"}
    for name in also:
        (folder / name).write_text("{}")
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 0
    assert not here.requests
    *lines, total, stays = capsys.readouterr().out.splitlines()
    listed = {line.split()[2]: int(line.split()[0].replace(",", "")) for line in lines}
    assert main(["publish", str(folder), "someone/bert"]) == 0
    assert {name: len(content) for name, content in published(here).items()} == listed
    assert listed.keys() == SENT | also
    assert total.split()[0] == f"{sum(listed.values()):,}"
    kept = {"checkpoint-20", "checkpoint-40", "notes.txt", "pytorch_model.bin", "secret.png", "training_log.jsonl"}
    assert set(stays.removeprefix("stays here: ").split(", ")) == kept


def test_nothing_sent_is_a_pickle_or_names_a_folder_of_this_machine(here, trained, books):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    files = published(here)
    for name, content in files.items():
        assert not content.startswith((b"\x80", b"PK")) and not name.endswith((".bin", ".pt", ".pkl")), name
        for path in (trained.parent, books.parent, Path.home(), Path(__file__).parent, Path(constants.HF_HOME)):
            assert not re.search(re.escape(str(path)).encode() + rb"(?![\w-])", content), (name, path)
    here_record, there = json.loads((trained / "run_config.json").read_text()), json.loads(files["run_config.json"])
    assert here_record["run"]["corpus"] == [str(books)] and there["run"]["corpus"] == ["books"]
    assert there["run"]["output_dir"] == "model" and "local_paths" not in there
    assert there["fingerprints"] == [here_record["local_paths"][str(books)]]
    left = {name: part for name, part in there.items() if name not in ("run", "fingerprints")}
    assert left == {name: here_record[name] for name in left}
    changed = {name for name, value in there["run"].items() if value != here_record["run"][name]}
    assert changed == {"corpus", "output_dir"}


def test_paths_of_the_start_and_the_tokenizer_go_out_as_names(here, trained, books, tmp_path, monkeypatch):
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
    assert "pretrained further on books" in card and "base_model" not in card and str(tmp_path) not in card


@pytest.mark.slow
def test_the_cards_examples_run_as_they_stand_and_pin_what_runs_code(here, trained, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    card, (tag,) = published(here)["README.md"].decode(), here.tags("someone/bert")
    assert card.count(f'from_pretrained("someone/bert", revision="{tag}", trust_remote_code=True)') == 2
    with_package, without, from_stock = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    (convert,) = re.findall(r"^d2l-bert (convert .*)$", card, re.MULTILINE)
    both = f"""
import os, shlex, sys
os.chdir({str(tmp_path)!r})
{with_package}
assert len(fill({TEXT!r})) == 5
from d2l_bert.cli import main
assert main(shlex.split({convert!r})) == 0
{from_stock}
assert type(model).__name__ == "BertForMaskedLM"
"""
    others = f"import sys\nsys.modules['d2l_bert'] = None\n{without}\nassert len(tokenizer) == model.config.vocab_size"
    for code in (both, others):
        process = run(code, here, tmp_path / "home", TOKEN)
        assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the folder's name


def test_what_was_published_goes_on_to_another_address_and_other_models_keep_theirs(here, folder, tmp_path):
    others = 'AutoModel.from_pretrained("google-bert/model")\n'
    (folder / "README.md").open("a").write(others)
    assert main(["publish", str(folder), "someone/bert"]) == 0
    again = tmp_path / "again"
    again.mkdir()
    for name, content in published(here).items():
        (again / name).write_bytes(content)
    assert main(["publish", str(again), "someone/else"]) == 0
    card, (tag,) = published(here, "someone/else")["README.md"].decode(), here.tags("someone/else")
    assert card.count('"someone/else"') == 3 and card.count(tag) == 2 and "someone/bert" not in card and others in card
    assert json.loads(published(here, "someone/else")["run_config.json"])["fingerprints"][0]["name"] == "books"


def test_a_card_that_begins_with_a_mark_or_ends_with_its_metadata_can_get_a_licence(here, folder):
    card = folder / "README.md"
    metadata = re.match(r"---\n.*?\n---", card.read_text(), re.DOTALL)[0]
    for text in ("\ufeff" + card.read_text(), metadata):
        card.write_text(text)
        assert main(["publish", str(folder), "someone/bert", "--license=mit"]) == 0
        assert ModelCard(published(here)["README.md"].decode()).data.license == "mit"


def test_two_texts_of_one_name_keep_a_fingerprint_each():
    paths = {path: {"name": "books", "fingerprint": path} for path in ("/a/books", "/b/books")}
    record = without_paths(
        {"run": {"corpus": list(paths), "seed": 1}, "local_paths": paths, "x": ["/c/d", "~/e", "/"]}
    )
    assert record["run"] == {"corpus": ["books", "books"], "seed": 1} and record["x"] == ["d", "e", "/"]
    assert record["fingerprints"] == list(paths.values()) and "local_paths" not in record


def test_an_edited_card_goes_as_it_was_edited(here, folder):
    card = folder / "README.md"
    card.write_text(card.read_text().replace("## Uses", "## Made with love\n\nBy us.\n\n## Uses"))
    before = card.read_text()
    assert main(["publish", str(folder), "someone/bert", "--license=mit"]) == 0
    sent = published(here)["README.md"].decode()
    assert "## Made with love\n\nBy us.\n" in sent and card.read_text() == before
    metadata, meant = ModelCard(sent).data.to_dict(), ModelCard(before).data.to_dict()
    assert metadata == {**meant, "license": "mit"}


def test_a_fine_tuned_model_serves_every_head_and_its_card_invents_nothing(here, trained, tmp_path):
    tuned = tmp_path / "tuned"
    D2lBertForSequenceClassification.from_pretrained(trained, num_labels=3).save_pretrained(tuned)
    AutoTokenizer.from_pretrained(trained).save_pretrained(tuned)
    own = "AutoModelForSequenceClassification"  # as a model has that was not ours before
    change_json(tuned / "config.json", auto_map={name: AUTO_MAP[name] for name in ("AutoConfig", own)})
    assert not (tuned / "vocab.txt").exists() and not (tuned / "README.md").exists()
    assert main(["publish", str(tuned), "someone/tuned", "--license=mit"]) == 0
    files = published(here, "someone/tuned")
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    assert files["vocab.txt"] == (trained / "vocab.txt").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert card.data.pipeline_tag == "text-classification" and card.data.license == "mit"
    assert card.data.eval_results is None and "Evaluation" not in card.text and "MLM loss" not in card.text
    assert 'AutoModelForSequenceClassification.from_pretrained("someone/tuned", revision="model-' in card.text


def test_a_model_from_the_hub_is_the_base_of_what_was_trained_further(here, trained, books, tmp_path, monkeypatch):
    assert main(["publish", str(trained), "someone/bert", "--public"]) == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "further"
    options = ["--max_steps=2", "--mixed_precision=no", "--max_seq_length=48", "--global_batch_size=8"]
    options += ["--license=mit", "--dataloader_num_workers=0", "--init_from=someone/bert"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *options]) == 0
    assert main(["publish", str(out), "someone/further"]) == 0
    card = ModelCard(published(here, "someone/further")["README.md"].decode())
    assert card.data.base_model == "someone/bert"
    assert json.loads(published(here, "someone/further")["run_config.json"])["run"]["init_from"] == "someone/bert"


# ---------------------------------------------------------------------------------------------------------------------
# What is refused before anything is sent


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_card(folder, old, new):
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new, 1))


def cut(file, share):
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def without_embedding(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if "position" in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_one_more(folder):
    weights = {**load_file(folder / "model.safetensors"), "bert.extra.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_nan(folder):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_hole(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] += 7
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def without_mask(folder):
    change_json(folder / "tokenizer_config.json", mask_token=None)


def better_loss(folder):
    loss = round(json.loads((folder / "metrics.json").read_text())["eval_mlm_loss"], 4)
    change_card(folder, f"value: {loss}", "value: 0.1234")


BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "a pickle instead": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "nothing but safe",
    ),
    "weights cut in half": (lambda f: cut(f / "model.safetensors", 0.5), "model.safetensors: damaged or cut short"),
    "weights cut to nothing": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors: damaged or cut short"),
    "weights a byte short": (
        lambda f: cut(f / "model.safetensors", 1 - 0.5 / (f / "model.safetensors").stat().st_size),
        "model.safetensors: damaged or cut short",
    ),
    "a weight gone": (without_embedding, "weights lack bert."),
    "a weight too many": (with_one_more, "weights hold bert.extra.weight"),
    "a weight not finite": (with_nan, "not finite"),
    "another size": (lambda f: change_json(f / "config.json", intermediate_size=65), "says intermediate_size 65"),
    "weights of another size": (
        lambda f: [change_json(f / "config.json", intermediate_size=65), (f / "run_config.json").unlink()],
        "another shape",
    ),
    "another vocabulary": (
        lambda f: change_json(f / "config.json", vocab_size=500),
        "says vocab_size 500",
    ),
    "another padding": (lambda f: change_json(f / "config.json", pad_token_id=3), "says pad_token_id 3"),
    "vocab.txt a line short": (
        lambda f: (f / "vocab.txt").write_text("\n".join((f / "vocab.txt").read_text().split("\n")[:-2]) + "\n"),
        "vocab.txt holds other tokens",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "a damaged tokenizer": (lambda f: cut(f / "tokenizer.json", 0.5), "tokenizer cannot be loaded"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a damaged configuration": (lambda f: cut(f / "config.json", 0.5), "config.json: cannot be read"),
    "another kind of model": (lambda f: change_json(f / "config.json", model_type="bert"), "not a d2l-bert one"),
    "an unknown class": (lambda f: change_json(f / "config.json", architectures=["D2lBertForX"]), "architectures is"),
    "no code": (lambda f: (f / "modeling_d2l_bert.py").unlink(), "modeling_d2l_bert.py is missing"),
    "other code for the configuration": (
        lambda f: (f / "configuration_d2l_bert.py").write_bytes((f / "configuration_d2l_bert.py").read_bytes()[:-1]),
        "configuration_d2l_bert.py: differs from that of the installed d2l-bert",
    ),
    "other code": (
        lambda f: (f / "modeling_d2l_bert.py").open("a").write("# mine\n"),
        "modeling_d2l_bert.py: differs from that of the installed d2l-bert",
    ),
    "no metadata": (lambda f: (f / "README.md").write_text("# A model\n"), "no metadata"),
    "invalid YAML": (lambda f: change_card(f, "language: en", "language: [en"), "not valid YAML"),
    "no licence": (lambda f: change_card(f, "license: apache-2.0\n", ""), "lacks a licence"),
    "an unknown licence": (lambda f: change_card(f, "license: apache-2.0", "license: Apache 2"), "write apache-2.0"),
    "a path as data set": (
        lambda f: change_card(f, "language: en\n", "language: en\ndatasets:\n- /data/books\n"),
        "'/data/books' is a path on this machine",
    ),
    "a relative path as data set": (
        lambda f: change_card(f, "language: en\n", "language: en\ndatasets: ./books\n"),
        "'./books' is a path on this machine",
    ),
    "a better loss than was measured": (
        lambda f: better_loss(f),
        "README.md: says MLM loss 0.1234, and metrics.json",
    ),
    "no size of the vocabulary": (lambda f: change_json(f / "config.json", vocab_size=None), "mend config.json"),
    "a class that is no name": (lambda f: change_json(f / "config.json", architectures=[3]), "architectures is [3]"),
    "numbers with a hole": (with_hole, "numbers have holes"),
    "no mask token": (without_mask, "has no mask token"),
    "a tokenizer with code of its own": (
        lambda f: change_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        "auto_map asks for code of its own",
    ),
    "an unknown tokenizer": (
        lambda f: change_json(f / "tokenizer_config.json", tokenizer_class="MyTokenizer"),
        "MyTokenizer is no stock class",
    ),
    "a card of another task": (
        lambda f: change_card(f, "pipeline_tag: fill-mask", "pipeline_tag: question-answering"),
        "which is for fill-mask",
    ),
    "figures that are words": (
        lambda f: change_json(f / "metrics.json", eval_mlm_loss="low"),
        "metrics.json: eval_mlm_loss (MLM loss) is 'low', no number; put back what was measured",
    ),
    "a record of another shape": (
        lambda f: change_json(f / "run_config.json", local_paths={"/x": 3}),
        "run_config.json: local_paths has 3 for /x; put back what the run wrote",
    ),
    "a record without data": (
        lambda f: change_json(f / "run_config.json", data=None),
        "run_config.json: data is None; put back what the run wrote",
    ),
    "endless brackets": (lambda f: (f / "metrics.json").write_text("[" * 100_000), "metrics.json: cannot be read"),
    "other heads than were trained": (
        lambda f: change_json(f / "config.json", num_attention_heads=4),
        "says num_attention_heads 4, and run_config.json 2",
    ),
    "a better loss in the text": (
        lambda f: change_card(f, "| MLM loss |", "| MLM loss | 0.123 nats |\n| MLM ross |"),
        "says MLM loss 0.123 nats, and metrics.json",
    ),
    "figures that nothing founds": (lambda f: (f / "metrics.json").unlink(), "there is no metrics.json to say so"),
    "a card that is no text": (lambda f: (f / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff"), "in UTF-8"),
    "somebody's home": (
        lambda f: (f / "README.md").open("a").write("Trained in /home/jane/texts.\n"),
        "names a folder of this machine (/home/jane)",
    ),
    "a path in the licence": (
        lambda f: (f / "LICENSE").write_text(f"As in {Path.home()}/x"),
        "LICENSE: names a folder of this machine",
    ),
    "an index of weights without weights": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: has no weight_map",
    ),
    "labels that are a number": (lambda f: change_json(f / "config.json", id2label=3), "mend config.json"),
    "a damaged record": (lambda f: cut(f / "run_config.json", 0.5), "run_config.json: cannot be read"),
    "a path in the text": (
        lambda f: (f / "README.md").open("a").write(f"Trained on {Path.home()}/secret.\n"),
        "README.md: names a folder of this machine",
    ),
}


def test_a_bug_while_a_folder_is_checked_is_shown_as_one(here, folder, monkeypatch, capsys):
    def fail(*_, **how):
        raise KeyError("of ours")

    for where in ("check_folder", "outgoing"):
        with monkeypatch.context() as patched:
            patched.setattr(f"d2l_bert.model_cards.publish.{where}", fail)
            assert main(["publish", str(folder), "someone/bert"]) == 1
        assert "this is a bug of d2l-bert" in capsys.readouterr().err
    monkeypatch.setattr("d2l_bert.modeling.conversion.load_and_compare", fail)
    assert main(["publish", str(folder), "someone/bert"]) == 1
    assert "this is a bug of d2l-bert" in capsys.readouterr().err


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_in_one_line_before_anything_is_sent(here, folder, how, capsys):
    breaks, words = BROKEN[how]
    breaks(folder)
    capsys.readouterr()
    assert main(["publish", str(folder), "someone/bert"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("d2l-bert publish: error: ") and said.err.count("\n") == 1 and not said.out
    assert words in said.err and str(folder) in said.err and ";" in said.err, said.err
    assert not here.requests and not here.repositories


def test_no_folder_and_no_name_are_refused(here, tmp_path, trained, capsys):
    for arguments, words in (
        ([str(tmp_path / "none"), "someone/bert"], "no such folder"),
        ([str(trained), "some one/bert"], "cannot be a repository"),
        ([str(trained), "a/b/c"], "cannot be a repository"),
    ):
        assert main(["publish", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert not here.requests


def test_code_that_is_meant_to_differ_goes_out_if_it_runs(here, folder, tmp_path, capsys):
    code = folder / "modeling_d2l_bert.py"
    code.write_text(code.read_text() + "\nMINE = True\n")
    assert main(["publish", str(folder), "someone/bert", "--changed_code"]) == 0
    assert published(here)["modeling_d2l_bert.py"] == code.read_bytes()
    whole = code.read_text()
    for changed in (
        whole + "\nraise RuntimeError('not today')\n",
        whole + "\nraise SystemExit(0)\n",
        whole.replace("class D2lBertForMultipleChoice", "class Other"),
    ):
        code.write_text(changed)
        capsys.readouterr()
        assert main(["publish", str(folder), "someone/bert", "--changed_code"]) == 2
        said = capsys.readouterr().err
        assert "cannot be run; mend the code" in said and said.count("\n") == 1
    assert len(here.commits("someone/bert")) == 2


def test_a_data_set_that_the_hub_does_not_know_is_refused_unless_the_run_read_it_there(here, folder, capsys):
    change_card(folder, "language: en\n", "language: en\ndatasets: some/texts\n")
    assert main(["publish", str(folder), "someone/bert"]) == 2
    assert "datasets names some/texts, which the Hub does not know" in capsys.readouterr().err
    assert not here.repositories
    record = json.loads((folder / "run_config.json").read_text())
    record["data"]["hub_datasets"] = ["some/texts"]
    (folder / "run_config.json").write_text(json.dumps(record))
    assert main(["publish", str(folder), "someone/bert"]) == 0


@pytest.mark.parametrize(
    ("token", "repo_id", "words"),
    [
        (None, "someone/bert", "no token for the Hub here"),
        ("hf_unknown", "someone/bert", "does not accept the token"),
        ("hf_ünknown", "someone/bert", "signs that no token has"),
        (TOKEN, "another/bert", "may not write there"),
    ],
)
def test_tokens_that_do_not_serve_are_refused_in_one_line(here, trained, monkeypatch, capsys, token, repo_id, words):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert main(["publish", str(trained), repo_id]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and "Traceback" not in said.err
    assert "hf auth login" in said.err and not here.repositories


def test_an_account_is_not_asked_when_the_hub_is_switched_off(here, trained, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["publish", str(trained), "someone/bert"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err and not here.requests


# ---------------------------------------------------------------------------------------------------------------------
# When the way there breaks

CUTS = {  # what the server is asked when it dies, and whether it did it before
    "before the repository": ("POST", "/api/repos/create", False),
    "at the first large file": ("PUT", "/storage/", False),
    "after the large files": ("POST", "/commit/", False),
    "after the commit": ("POST", "/commit/", True),
    "before the tag": ("POST", "/tag/", False),
}


@pytest.mark.parametrize("when", CUTS)
def test_a_server_that_dies_half_way_is_said_and_the_same_command_completes_it(here, folder, when, capsys):
    at_method, at_path, is_served = CUTS[when]
    publish = ["publish", str(folder), "someone/bert"]

    def die(method, path):
        if method == at_method and at_path in path:
            if is_served:
                return -1
            here.stop()
            return 0
        return None

    logged, client = [], logging.getLogger("huggingface_hub")
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    client.addHandler(handler)
    here.fail = die
    assert main(publish) == 2
    client.removeHandler(handler)
    said = capsys.readouterr().err
    assert not logged and ("trying again" in said) == (at_method == "PUT")
    (line,) = [line for line in said.splitlines() if line.startswith("d2l-bert")]
    assert "the same command again completes it" in line and "Traceback" not in said
    assert len(said.splitlines()) <= 2 and "/storage/" not in said  # a signed address is nobody's
    here.fail = None
    if not is_served:
        here.start()
    assert main(publish) == 0
    assert published(here).keys() == SENT
    assert published(here)["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert here.tags("someone/bert") and len(here.commits("someone/bert")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--collection=someone/none-0123456789abcdef01234567"], "the Hub refuses (404"),
        (["--create_pr", "--revision=none"], "no such revision"),
    ],
)
def test_what_is_not_there_to_put_it_into_is_said_before_the_commit(here, trained, capsys, options, words):
    assert main(["publish", str(trained), "someone/bert", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not published(here)


def test_an_address_that_is_no_hub_is_said(trained, monkeypatch, capsys):
    class Shop(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"Buy two, pay one")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert main(["publish", str(trained), "someone/bert"]) == 2
        server.shutdown()
    said = capsys.readouterr().err
    assert "answers as no Hub does" in said and "Traceback" not in said


def test_what_is_no_error_of_the_hubs_is_not_taken_for_one():
    with pytest.raises(RuntimeError, match="ours"), hub_errors("someone/bert"):
        raise RuntimeError("a mistake of ours") from ConnectionError()
    with pytest.raises(ValueError, match="broke during an upload .client has been closed.; .* completes it"):
        with hub_errors("someone/bert"):  # which the client's threads do to each other
            raise RuntimeError("Error while uploading 'x' to the Hub.") from RuntimeError("client has been closed")


def test_an_upload_that_is_refused_says_why(here, folder, capsys):
    here.fail = lambda method, path: 400 if method == "PUT" else None
    assert main(["publish", str(folder), "someone/bert"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("d2l-bert")]
    assert "the Hub refuses (400" in line


@pytest.mark.parametrize("status", [500, 503, 429, 400])
def test_a_server_that_fails_is_said_in_one_line(here, folder, status, capsys):
    here.fail = lambda method, path: status if "/commit/" in path else None
    assert main(["publish", str(folder), "someone/bert"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("d2l-bert")]
    assert str(status) in line and (status < 500 or "the same command again completes it" in line)
    here.fail = None
    assert main(["publish", str(folder), "someone/bert"]) == 0 and published(here).keys() == SENT


# ---------------------------------------------------------------------------------------------------------------------
# The token


def test_the_token_is_used_and_in_nothing_that_is_said_or_sent(here, folder, capfd):
    assert main(["publish", str(folder), "someone/bert"]) == 0
    said = capfd.readouterr()
    assert TOKEN in {request.token for request in here.requests} and "someone/bert" in said.out
    assert TOKEN not in said.out + said.err
    for name, content in here.files("someone/bert").items():
        assert TOKEN.encode() not in content, name


@pytest.mark.slow
def test_the_token_is_in_no_output_log_file_or_process_list(hub, folder, tmp_path):
    token = "hf_" + hashlib.sha256(b"nobody's").hexdigest()[:34]
    hub.users[token] = "someone"
    variables = {**environment(hub, tmp_path / "home", token), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "d2l_bert", "publish", str(folder), "someone/bert"]
    seen, said = set(), tmp_path / "said.txt"
    hub.fail = lambda method, path: time.sleep(0.05)  # long enough to be looked at
    with said.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, cwd=tmp_path)
        while process.poll() is None:
            for listed in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(listed.read_bytes())
                except OSError:  # it has ended
                    continue
            time.sleep(0.01)
    assert process.returncode == 0, said.read_text()
    assert any(b"publish" in command and str(folder).encode() in command for command in seen)  # it was looked at
    assert token in {request.token for request in hub.requests}  # and the token was used
    assert not any(token.encode() in command for command in seen)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert said in files and folder / "README.md" in files
    for path in files:
        assert token.encode() not in path.read_bytes(), path
    for revision in hub.commits("someone/bert"):
        for name, content in hub.files("someone/bert", revision).items():
            assert token.encode() not in content, name


# ---------------------------------------------------------------------------------------------------------------------
# The public Hub


@pytest.mark.skipif(
    not (os.environ.get("D2L_BERT_TEST_HUB") and os.environ.get("HF_TOKEN")),
    reason="wants D2L_BERT_TEST_HUB=1 and HF_TOKEN, to publish a model of some kilobytes and delete it again",
)
def test_the_public_hub_takes_a_model_and_gives_it_back(trained, tmp_path):
    repo_id = f"d2l-bert-test-{uuid.uuid4().hex[:12]}"
    code = f"""
import torch
from huggingface_hub import HfApi
from d2l_bert import D2lBertForMaskedLM
from d2l_bert.cli import main
api = HfApi()
repo_id = api.whoami()["name"] + "/{repo_id}"
try:
    assert main(["publish", {str(trained)!r}, repo_id]) == 0
    assert api.model_info(repo_id).private
    (tag,) = api.list_repo_refs(repo_id).tags
    here, there = (D2lBertForMaskedLM.from_pretrained(name).state_dict() for name in ({str(trained)!r}, repo_id))
    assert all(torch.equal(there[name], weight) for name, weight in here.items())
    assert main(["publish", {str(trained)!r}, repo_id]) == 0
    assert len(api.list_repo_commits(repo_id)) == 2
finally:
    api.delete_repo(repo_id, missing_ok=True)
"""
    told = ("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    variables = {name: value for name, value in os.environ.items() if name not in told}
    process = subprocess.run(
        [sys.executable, "-c", code], env={**variables, "HF_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
