"""Publishing a model folder on a Hub, and loading the model from there."""

import os
import subprocess
import sys
import uuid

import pytest
import torch
from local_hub import TOKEN
from publishing import SENT, TEXT, published, run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.model_cards.outgoing import with_repository_in_card


# ---------------------------------------------------------------------------------------------------------------------
# Publish and load

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
def test_readers_load_the_same_logits_by_name_by_revision_and_offline(here, trained, tmp_path, remote, capsys):
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


@pytest.mark.slow
def test_publish_prints_the_page_and_three_lines_that_load_the_model(here, trained, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"published: {here.endpoint}/someone/bert (private)") and len(lines) == 3
    process = run("\n".join(map(str.strip, lines)) + "\nprint(type(model).__name__)", here, tmp_path, TOKEN)
    assert (process.returncode, process.stdout.split()) == (0, ["D2lBertForMaskedLM"]), process.stderr


def test_a_snapshot_and_the_hf_command_download_every_byte(here, trained, tmp_path):
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


def test_a_second_model_is_a_second_commit_and_the_first_tag_still_loads_the_first(here, folder, tmp_path):
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


def test_no_weights_or_metrics_of_an_earlier_commit_remain_beside_the_new_ones(here, trained, folder, tmp_path):
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


def test_publishing_the_same_folder_again_makes_no_commit(here, trained):
    for _ in range(2):
        assert main(["publish", str(trained), "bert"]) == 0  # a name without an owner is under the token's account
    assert len(here.commits("someone/bert")) == 2 and len(here.tags("someone/bert")) == 1


def test_branch_message_pull_request_and_collection_are_used(here, trained, folder, capsys):
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
# The public Hub


@pytest.mark.skipif(
    not (os.environ.get("D2L_BERT_TEST_HUB") and os.environ.get("HF_TOKEN")),
    reason="wants D2L_BERT_TEST_HUB=1 and HF_TOKEN, to publish a model of some kilobytes and delete it again",
)
def test_the_public_hub_accepts_a_model_and_returns_it(trained, tmp_path):
    repo_id = f"d2l-bert-test-{uuid.uuid4().hex[:12]}"
    code = f"""
import torch
from huggingface_hub import HfApi
from d2l_bert import D2lBertForMaskedLM
from d2l_bert.cli import main
from d2l_bert.model_cards.outgoing import with_repository_in_card
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


@pytest.mark.parametrize("repo_id", ["2bits/bert", "01-ai/bert", "1e5/3d-bert"])
def test_a_repository_whose_name_begins_with_a_digit_gets_a_card_with_its_name(trained, tmp_path, repo_id):
    """A digit behind a group's number in a replacement would belong to that number."""
    files = {"README.md": (trained / "README.md").read_bytes()}
    card = with_repository_in_card(files, "model", repo_id, "model-0123456789ab")["README.md"].decode()
    assert f'pipeline("fill-mask", model="{repo_id}")' in card and '"model"' not in card
    assert f'from_pretrained("{repo_id}", revision="model-0123456789ab", trust_remote_code=True)' in card
    assert main(["publish", str(trained), repo_id, "--dry_run"]) == 0
