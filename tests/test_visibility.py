"""Private and public repositories: what publishing shows, to whom, and when."""

import copy
import itertools

import pytest
from publishing import run
from safetensors.torch import load_file, save_file

from d2l_bert.cli import main


@pytest.mark.slow
def test_a_private_model_is_visible_to_its_owner_only(here, trained, tmp_path, monkeypatch, capsys):
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


def test_a_repository_is_private_unless_public_is_given_and_keeps_its_visibility(here, trained):
    publish = ["publish", str(trained), "someone/bert"]
    for options, is_private in (([], True), (["--public"], False), ([], False)):
        assert main([*publish, *options]) == 0
        assert here.is_private("someone/bert") == is_private
    assert len(here.commits("someone/bert")) == 2


def fail_from(hub, number, failure):
    """
    Make the Hub fail from request `number` on. `failure`: a status; "dead"; or "no answer", after serving the request.
    """
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
        (403, False),
        *(
            pytest.param(failure, exists, marks=pytest.mark.slow)
            for failure in (403, 500, "dead", "no answer")
            for exists in (False, True)
            if (failure, exists) != (403, False)
        ),
    ],
)
def test_wherever_publishing_fails_nothing_is_public_before_the_new_commit(here, folder, capsys, failure, exists):
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
        """Whether the new commit is on the Hub."""
        branches = here.branches("someone/bert") if here.repositories else {}
        files = here.files("someone/bert", "trial") if "trial" in branches else {}
        return files.get("model.safetensors") == (folder / "model.safetensors").read_bytes()

    def is_open():
        return bool(here.repositories) and not here.is_private("someone/bert")

    for _ in range(2):  # a process's first run makes one more request, about AI agents
        start_again()
        here.requests.clear()
        assert main(publish) == 0 and is_there() and is_open()
    requests = [(request.method, request.path) for request in here.requests]
    for number in range(1, len(requests) + 1):  # this request and all later ones fail
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


def test_that_earlier_private_commits_become_public_is_said_before_anything_is_changed(here, trained, capsys):
    publish, said = ["publish", str(trained), "someone/bert"], []
    words = "someone/bert is private: it is made public when the model is there, and then everybody can see the"
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


def test_a_pull_request_makes_nothing_public(here, trained, capsys):
    for dry_run in ([], ["--dry_run"]):
        assert main(["publish", str(trained), "someone/bert", "--create_pr", "--public", *dry_run]) == 2
        said = capsys.readouterr().err
        assert "makes no repository public; leave public out" in said and said.count("\n") == 1
    assert not here.requests
    assert main(["publish", str(trained), "someone/bert", "--create_pr"]) == 0
    assert here.is_private("someone/bert")
