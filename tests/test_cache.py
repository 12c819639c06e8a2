"""The cache of prepared text: what has changed there is made anew, and what another user put there is not read."""

import dataclasses
import os
import random
import shutil

import pyarrow as pa
import pytest
from huggingface_hub import constants

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.tokenization.cache import SEAL_FILE, _seal, cache_folder, write_once
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def files_of(home, kind):
    """The files of the cache's folders of a kind."""
    found = []
    for folder in (home / "d2l_bert").glob(f"{kind}-*"):
        found += folder.iterdir()
    return found


def fill(path):
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_unseen(path):
    """One bit, and the time of the last change as it was."""
    content = bytearray(path.read_bytes())
    status = path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def put_link(path):
    """A link to a copy, which could be changed at any time."""
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    path.parent.parent.joinpath("elsewhere").write_bytes(b"other")


@pytest.mark.slow
@pytest.mark.parametrize("harm", [fill, cut, change_unseen, put_link, os.unlink])
def test_a_file_of_the_cache_that_has_changed_is_made_anew_with_the_same_result(harm, books, home, tmp_path, capsys):
    def prepared(name):
        assert main(["prepare", f"--corpus={books}", f"--output_dir={tmp_path / name}", "--vocab_size=300"]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / name / "train").iterdir()}

    before = prepared("before")
    for kind in ("text", "tokenizer", "tokens"):
        for path in files_of(home, kind):
            if path.exists():
                harm(path)
        capsys.readouterr()
        assert prepared(f"after-{kind}") == before
        assert "made anew" in capsys.readouterr().err
    assert prepared("again") == before and "made anew" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "seal", ["", "[]", "{}", '{"name": 1, "files": []}', "[" * 10_000, '{"name": "x", "files": {"a": 1}}']
)
def test_an_entry_whose_seal_is_damaged_is_made_anew(seal, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "written.json").write_text(seal)
    write_once(tmp_path / "x", lambda folder: (folder / "whole").write_text("good"))
    assert (tmp_path / "x" / "whole").read_text() == "good"


def seal(folder):
    """Write down the hashes of a folder of the cache anew, which needs no secret."""
    (folder / SEAL_FILE).unlink()
    _seal(folder, folder.name)


def test_sentences_of_the_cache_that_point_nowhere_are_one_line(books, home):
    """They would end the process, or show what else is in memory."""
    config = TextConfig(corpus=[str(books)], vocab_size=300)
    prepare(config)
    (path,) = (home / "d2l_bert").rglob("data.arrow")
    table = pa.ipc.open_file(path).read_all()
    ends = table["sentences"].chunks[0].flatten().buffers()[1]  # where each sentence ends, in bytes
    content = bytearray(path.read_bytes())
    place = path.read_bytes().index(ends.to_pybytes()[:40])
    content[place + 8 : place + 12] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)
    seal(path.parent)
    with pytest.raises(UserError, match="is damaged .* delete it"):
        prepare(dataclasses.replace(config, vocab_size=200))


def test_an_entry_under_the_name_of_another_is_not_read(tmp_path):
    write_once(tmp_path / "x", lambda folder: (folder / "whole").write_text("x"))
    (tmp_path / "x").rename(tmp_path / "y")
    write_once(tmp_path / "y", lambda folder: (folder / "whole").write_text("y"))
    assert (tmp_path / "y" / "whole").read_text() == "y"


def test_a_link_and_a_file_in_place_of_an_entry_are_replaced_and_what_they_lead_to_stays(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "whole").write_text("other")
    (tmp_path / "x").symlink_to("other")
    (tmp_path / "y").write_text("")
    for name in "xy":
        write_once(tmp_path / name, lambda folder: (folder / "whole").write_text("good"))
        assert (tmp_path / name / "whole").read_text() == "good"
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "other" / "whole").read_text() == "other"


def test_a_copied_cache_is_read_by_its_hashes(tmp_path):
    write_once(tmp_path / "a" / "x", lambda folder: (folder / "whole").write_text("good"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write_once(tmp_path / "b" / "x", lambda folder: pytest.fail("it is whole"))


def test_other_users_can_neither_read_nor_change_the_cache(books, home):
    (home / "d2l_bert").mkdir(parents=True)
    (home / "d2l_bert").chmod(0o777)
    prepare(TextConfig(corpus=[str(books)], vocab_size=300))
    assert (home / "d2l_bert").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_cache_of_another_user_is_said_and_not_read(kind, books, home, tmp_path, caplog):
    prepare(TextConfig(corpus=[str(books)], vocab_size=300))
    cache = home / "d2l_bert"
    if kind == "link":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    os.chown(cache, 12345, 12345, follow_symlinks=False)
    inside = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    prepare(TextConfig(corpus=[str(books)], vocab_size=300))
    assert f"d2l_bert-{os.geteuid()}" in caplog.text and "another user" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == inside
    assert cache_folder() == home / f"d2l_bert-{os.geteuid()}" and any(cache_folder().glob("tokens-*"))
    os.chown(cache_folder(), 12345, 12345)
    with pytest.raises(UserError, match="another user; set HF_HOME"):
        prepare(TextConfig(corpus=[str(books)], vocab_size=300))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_a_home_that_another_user_has_closed_is_answered_with_the_way_out(home):
    home.mkdir(mode=0o700)
    os.seteuid(12345)
    try:
        with pytest.raises(UserError, match="Permission denied.* set HF_HOME to another folder"):
            write_once(cache_folder() / "tokens-1", lambda path: None)
    finally:
        os.seteuid(0)
