"""Uploads that fail on the way: what is reported, and what the same command completes."""

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from local_hub import TOKEN
from publishing import SENT, published

from d2l_bert.cli import main
from d2l_bert.model_cards.publish import hub_errors


CUTS = {  # the request at which the server dies, and whether that request is served first
    "before the repository": ("POST", "/api/repos/create", False),
    "at the first large file": ("PUT", "/storage/", False),
    "after the large files": ("POST", "/commit/", False),
    "after the commit": ("POST", "/commit/", True),
    "before the tag": ("POST", "/tag/", False),
}


@pytest.mark.parametrize("when", CUTS)
def test_if_the_server_dies_half_way_the_same_command_completes_the_upload(here, folder, when, capsys):
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
    assert not logged
    (line,) = [line for line in said.splitlines() if line.startswith("d2l-bert")]
    assert "run the same command again to complete the upload" in line and "Traceback" not in said
    # A signed address gives access, so it must not be shown.
    assert len(said.splitlines()) <= 2 and "/storage/" not in said
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


def test_a_refused_upload_says_why(here, folder, capsys):
    here.fail = lambda method, path: 400 if method == "PUT" else None
    assert main(["publish", str(folder), "someone/bert"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("d2l-bert")]
    assert "refuses" in line and "400" in line


@pytest.mark.parametrize("status", [500, 503, 429, 400])
def test_an_error_of_the_server_is_reported_in_one_line(here, folder, status, capsys):
    here.fail = lambda method, path: status if "/commit/" in path else None
    assert main(["publish", str(folder), "someone/bert"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("d2l-bert")]
    assert str(status) in line and (status < 500 or "run the same command again to complete the upload" in line)
    here.fail = None
    assert main(["publish", str(folder), "someone/bert"]) == 0 and published(here).keys() == SENT
