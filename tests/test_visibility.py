"""Private and public repositories: what publishing shows, to whom, and when."""

import pytest
from publishing import run

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


def test_a_pull_request_makes_nothing_public(here, trained, capsys):
    for dry_run in ([], ["--dry_run"]):
        assert main(["publish", str(trained), "someone/bert", "--create_pr", "--public", *dry_run]) == 2
        said = capsys.readouterr().err
        assert "makes no repository public; leave public out" in said and said.count("\n") == 1
    assert not here.requests
    assert main(["publish", str(trained), "someone/bert", "--create_pr"]) == 0
    assert here.is_private("someone/bert")
