"""Uploads that fail on the way: what is reported, and what the same command completes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from local_hub import TOKEN
from publishing import published

from d2l_bert.cli import main
from d2l_bert.model_cards.publish import hub_errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--collection=someone/none-0123456789abcdef01234567"], "refuses"),
        (["--create_pr", "--revision=none"], "refuses"),
    ],
)
def test_a_missing_collection_or_revision_is_refused_before_the_commit(here, trained, capsys, options, words):
    assert main(["publish", str(trained), "someone/bert", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not published(here)


def test_a_server_that_is_no_hub_is_reported(trained, monkeypatch, capsys):
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
    assert "is no Hub" in said and "Traceback" not in said


def test_errors_of_our_own_are_not_reported_as_the_hubs():
    with pytest.raises(RuntimeError, match="ours"), hub_errors("someone/bert"):
        raise RuntimeError("a mistake of ours")
    with pytest.raises(ValueError, match="client has been closed.; .* complete the upload"):
        with hub_errors("someone/bert"):  # when one thread of the client fails, the others find it closed
            raise RuntimeError("Error while uploading 'x' to the Hub.") from RuntimeError("client has been closed")
