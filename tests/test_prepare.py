"""Prepared folders: `prepare --check` and a run notice changed files."""

import os
import shutil

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main
from d2l_bert.tokenization import prepared_folder


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    """The folder that `d2l-bert prepare` writes for the books."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert (
        main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400", "--lowercase=false"]) == 0
    )
    return folder


def options(*changes):
    """The options of the small model that a prepared folder does not fix, and further options."""
    return [*(option for option in SMALL if not option.startswith("--vocab_size")), *changes]


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in said and "Traceback" not in said
    return said


def test_check_notices_one_changed_byte_in_any_file_of_a_prepared_folder(prepared, tmp_path, capsys):
    folder, other = tmp_path / "tokens", tmp_path / "other"
    shutil.copytree(prepared, folder)
    shutil.copytree(prepared, other)
    capsys.readouterr()
    assert main(["prepare", "--check", str(folder)]) == main(["prepare", "--check", str(other)]) == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    text = prepared_folder.read_prepared_folder(folder)
    counts = f"24 documents, {len(text.train.ids) + len(text.held_out.ids):,} tokens"
    assert capsys.readouterr().out.splitlines() == [f"{path}: whole; {counts}" for path in (folder, other)]
    assert len(files) >= 15
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(bytes([*whole[: len(whole) // 2], whole[len(whole) // 2] ^ 1, *whole[len(whole) // 2 + 1 :]]))
        said = refused(capsys, "prepare", "--check", folder)
        assert f"corpus {folder}: " in said and "prepare the text again" in said, file
        file.write_bytes(whole)


def test_a_run_notices_files_of_another_size_and_changed_small_files(prepared, tmp_path, capsys):
    for file in (path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file()):
        folder = tmp_path / "tokens"
        shutil.copytree(prepared, folder)
        content = (folder / file).read_bytes()
        is_large = file.suffix == ".bin"
        middle = len(content) // 2
        changed = content + b"x" if is_large else content[:middle] + b"\1" + content[middle + 1 :]
        (folder / file).write_bytes(changed)
        out = f"--output_dir={tmp_path / 'out'}"
        said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
        assert str(folder) in said and "prepare the text again" in said, file
        shutil.rmtree(folder)
    shutil.copytree(prepared, folder)
    (folder / "prepared.json").unlink()
    said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
    assert "a prepared folder, not text" in said
    assert os.listdir(tmp_path) == ["tokens"]
