"""The real clients (huggingface_hub, its command, Transformers) work with the small Hub of the tests."""

import hashlib
import subprocess
import sys
from http.client import HTTPConnection, HTTPException
from textwrap import dedent

import pytest
from hub_cards import read_card
from hub_store import GITATTRIBUTES
from local_hub import environment


SOMEONE, ANOTHER = "hf_made_up_for_someone", "hf_made_up_for_another"

# Every script begins with this: a folder with a small and a large file, and `told`, which prints how a call failed.
HEAD = """
from pathlib import Path
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
api, name = HfApi(), "someone/bert"

def told(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except Exception as error:
        answer = getattr(error, "response", None)
        print(type(error).__name__, "no answer" if answer is None else answer.status_code)
    else:
        print("done")
"""


@pytest.fixture
def say(hub, tmp_path):
    """Runs a script in a process of its own; returns the lines that the script prints."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\npipeline_tag: fill-mask\n---\n# A model\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "sub" / "a name.txt").write_text("grün\n")

    def run(script, token=SOMEONE, home="home"):
        variables = {**environment(hub, tmp_path / home, token), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", HEAD + dedent(script)]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_published_files_can_be_downloaded_and_the_token_goes_to_no_other_server(hub, say, tmp_path):
    lines = say(
        """
        api.create_repo(name, private=True)
        first = api.upload_folder(repo_id=name, folder_path="model").oid
        assert api.upload_folder(repo_id=name, folder_path="model").oid == first  # nothing new: no commit
        model = api.model_info(name, files_metadata=True)
        print(model.sha == first, model.private, model.card_data.license, model.pipeline_tag)
        print(*(file.lfs.sha256 for file in model.siblings if file.lfs))
        print(snapshot_download(name))
        """
    )
    sent = {str(path.relative_to(tmp_path / "model")): path.read_bytes() for path in (tmp_path / "model").rglob("*.*")}
    assert hub.files("someone/bert") == {**sent, ".gitattributes": GITATTRIBUTES.encode()}
    assert len(hub.commits("someone/bert")) == 2 and hub.is_private("someone/bert")
    assert lines[0] == "True True mit fill-mask"
    assert lines[1] == hashlib.sha256(sent["model.safetensors"]).hexdigest()
    snapshot = tmp_path.joinpath(lines[2])
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*.*")} == {*sent, ".gitattributes"}
    assert all((snapshot / path).read_bytes() == data for path, data in sent.items())
    large = [request for request in hub.requests if request.path.startswith("/storage/")]
    assert [(request.method, request.token) for request in large] == [("PUT", None), ("GET", None)]
    assert {request.token for request in hub.requests if request.path.startswith("/someone/")} == {SOMEONE}


def test_tags_commits_branches_and_pull_requests_keep_naming_the_same_files(hub, say):
    lines = say(
        """
        api.create_repo(name)
        old = api.upload_file(repo_id=name, path_or_fileobj=b"old", path_in_repo="file.txt").oid
        api.create_tag(name, tag="v1")
        api.create_branch(name, branch="side/way")
        api.upload_file(repo_id=name, path_or_fileobj=b"new", path_in_repo="file.txt", parent_commit=old)
        change = [CommitOperationDelete("file.txt"), CommitOperationAdd("other.bin", b"\\0")]
        pull = api.create_commit(name, change, commit_message="Other", create_pr=True)
        for revision in ("v1", old, "side/way", "main"):
            print(Path(hf_hub_download(name, "file.txt", revision=revision)).read_text())
        print(pull.pr_revision, *api.list_repo_files(name, revision=pull.pr_revision))
        told(api.create_commit, name, change[:1], commit_message="Late", parent_commit=old)
        told(api.create_tag, name, tag="v1")
        told(hf_hub_download, name, "file.txt", revision="v2")
        told(hf_hub_download, name, "absent.txt")
        told(api.delete_file, "absent.txt", name)
        api.delete_tag(name, tag="v1")
        api.delete_branch(name, branch="side/way")
        """
    )
    assert lines[:4] == ["old", "old", "old", "new"]
    assert lines[4] == "refs/pr/1 .gitattributes other.bin"
    refused = ["HfHubHTTPError 412", "HfHubHTTPError 409", "RevisionNotFoundError 404"]
    assert lines[5:] == [*refused, "RemoteEntryNotFoundError 404", "RemoteEntryNotFoundError 404"]
    assert hub.tags("someone/bert") == {} and list(hub.branches("someone/bert")) == ["main"]
    assert len(hub.commits("someone/bert")) == 3


@pytest.mark.slow
def test_a_user_without_access_cannot_learn_that_a_repository_exists(hub, say):
    say("api.create_repo(name, private=True); api.upload_folder(repo_id=name, folder_path='model')")
    look = """
    told(api.model_info, name)
    told(hf_hub_download, name, "README.md")
    told(api.upload_folder, repo_id=name, folder_path="model")
    told(api.create_repo, name)
    """
    hidden, absent = "RepositoryNotFoundError 401", "RepositoryNotFoundError 404"
    assert say(look, token=None, home="none") == [hidden, hidden, hidden, "HfHubHTTPError 401"]
    assert say(look, ANOTHER, home="another") == [absent, absent, absent, "HfHubHTTPError 403"]
    assert say(look, "hf_of_nobody", home="nobody") == ["HfHubHTTPError 401"] * 4
    assert say("api.update_repo_settings(name, private=False); told(api.model_info, name, token=False)") == ["done"]
    assert say("told(api.upload_folder, repo_id=name, folder_path='model')", ANOTHER) == ["HfHubHTTPError 403"]
    assert say("api.delete_repo(name); told(api.model_info, name)") == [absent]
    assert hub.repositories == {}


def test_the_hf_command_downloads_a_repository(hub, say, tmp_path):
    say("api.create_repo(name, private=True); api.upload_folder(repo_id=name, folder_path='model')")
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", "someone/bert", "--local-dir=here"]
    done = subprocess.run(
        command, env=environment(hub, tmp_path / "other", SOMEONE), cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"weights" * 1000
    assert (tmp_path / "here" / "sub" / "a name.txt").read_text() == "grün\n"


@pytest.mark.slow
def test_a_lost_connection_and_an_error_reach_the_client(hub, say):
    """Even if the Hub had already carried the request out."""
    push = "told(api.upload_folder, repo_id=name, folder_path='model')"
    say("api.create_repo(name)")
    answers = []
    hub.fail = lambda method, path: answers.pop() if path.endswith("/commit/main") else None
    for answer, heard, commits in ((0, "no answer", 1), (503, "503", 1), (-1, "no answer", 2)):
        answers.append(answer)
        assert say(push)[0].split(" ", 1)[1] == heard
        assert len(hub.commits("someone/bert")) == commits
    hub.fail = None
    assert say(push) == ["done"]
    assert len(hub.commits("someone/bert")) == 2  # the second upload changes nothing: no new commit
    assert sum(request.method == "PUT" for request in hub.requests) == 1


@pytest.mark.slow
def test_a_stopped_hub_answers_nobody_and_keeps_its_state_when_started_again(hub, say):
    """The Hub is stopped when a client has uploaded its files and is about to commit."""
    say("api.create_repo(name)")
    endpoint = hub.endpoint
    hub.fail = lambda method, path: hub.stop() if path.endswith("/commit/main") else None
    lines = say("told(api.upload_folder, repo_id=name, folder_path='model'); told(api.whoami)")
    assert [line.split(" ", 1)[1] for line in lines] == ["no answer", "no answer"]
    seen = len(hub.requests)
    hub.fail = None
    hub.start()
    assert hub.endpoint == endpoint and len(hub.requests) == seen
    assert say("told(api.upload_folder, repo_id=name, folder_path='model')") == ["done"]
    assert len(hub.commits("someone/bert")) == 2
    assert sum(request.method == "PUT" for request in hub.requests) == 1


def test_a_stopped_hub_leaves_no_connection_open(hub):
    client = HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=10)
    for _ in range(2):  # the second request uses the connection of the first
        client.request("GET", "/api/models/someone/bert")
        assert client.getresponse().read()
    hub.stop()
    with pytest.raises((HTTPException, ConnectionError)):
        client.request("GET", "/api/models/someone/bert")
        client.getresponse()
    assert len(hub.requests) == 2


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ("license: [mit", "YAML"),
        ("license: 3", "license"),
        ("language: English", "language"),
        ("datasets: [books, ./corpus]", "datasets[1]"),
        ("base_model: /home/someone/bert", "base_model[0]"),
        ("model-index: {name: bert}", "model-index"),
        ("model-index: [{name: bert, results: [{task: {type: fill-mask}, metrics: []}]}]", "results[0].dataset"),
    ],
)
def test_a_card_that_the_hub_rejects_is_refused(metadata, place):
    _, errors, _ = read_card(f"---\n{metadata}\n---\n# A model\n")
    assert len(errors) == 1 and place in errors[0]


def test_a_refused_card_is_not_published(hub, say, tmp_path):
    (tmp_path / "model" / "README.md").write_text("---\nlicense: 3\n---\n")
    lines = say(
        """
        from huggingface_hub import ModelCard
        api.create_repo(name)
        told(api.upload_folder, repo_id=name, folder_path="model")
        told(api.create_commit, name, [CommitOperationAdd("README.md", "model/README.md")], commit_message="Card")
        """
    )
    assert lines == ["ValueError no answer", "ValueError no answer"]
    assert len(hub.commits("someone/bert")) == 1


def test_collections_and_datasets_can_be_made_and_read(say):
    lines = say(
        """
        api.create_repo(name)
        for _ in range(2):
            slug = api.create_collection("Our models", exists_ok=True).slug
            api.add_collection_item(slug, name, "model", note="small", exists_ok=True)
        print(slug[:19], *((one.item_id, one.note) for one in api.get_collection(slug).items))
        told(api.create_collection, "Our models")
        told(api.add_collection_item, slug, name, "model")
        told(api.add_collection_item, slug, "someone/none", "model")
        print(api.create_repo("someone/text", repo_type="dataset").repo_type, api.dataset_info("someone/text").id)
        told(api.dataset_info, name)
        told(api.super_squash_history, name)
        """
    )
    assert lines[0] == "someone/our-models- ('someone/bert', 'small')"
    assert lines[1:4] == ["HfHubHTTPError 409", "HfHubHTTPError 409", "RepositoryNotFoundError 404"]
    assert lines[4:] == ["dataset someone/text", "RepositoryNotFoundError 404", "HfHubHTTPError 501"]


@pytest.mark.slow
def test_transformers_publishes_and_loads(hub, say):
    """Loads with another home folder, so without the cache of the first process."""
    sums = """
    import torch
    from transformers import BertConfig, BertModel
    def total(model):
        return sum(weight.double().sum() for weight in model.parameters()).item()
    """
    sizes = "vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20"
    pushed = say(
        dedent(sums)
        + f"model = BertModel(BertConfig({sizes})); print(total(model)); model.push_to_hub(name, private=True)"
    )
    assert {"config.json", "model.safetensors"} < set(hub.files("someone/bert"))
    assert say(dedent(sums) + "print(total(BertModel.from_pretrained(name)))", home="other") == pushed
    assert {request.status for request in hub.requests} <= {200, 302, 404}
