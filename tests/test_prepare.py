"""Prepared folders: what `prepare --check` says, and changed files that a run notices."""

import shutil

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main
from d2l_bert.tokenization import prepared_folder


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    """The folder that `d2l-bert prepare` writes for the books."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400"]) == 0
    return folder


def test_check_says_what_a_folder_holds(prepared, capsys):
    text = prepared_folder.read_prepared_folder(prepared)
    assert main(["prepare", "--check", str(prepared)]) == 0
    tokens = len(text.train.ids) + len(text.held_out.ids)
    assert capsys.readouterr().out.endswith(f"{prepared}: whole; 24 documents, {tokens:,} tokens\n")


def test_a_run_notices_files_of_another_size_and_changed_small_files(prepared, tmp_path, fails):
    folder, out = shutil.copytree(prepared, tmp_path / "tokens"), tmp_path / "out"
    options = [option for option in SMALL if not option.startswith("--vocab_size")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 15
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        is_large = file.suffix == ".bin"
        file.write_bytes(whole + b"x" if is_large else whole[:middle] + b"\1" + whole[middle + 1 :])
        said = fails("pretrain", f"--corpus={folder}", f"--output_dir={out}", "--max_steps=1", *options)
        assert str(folder) in said and "prepare the text again" in said, file
        file.write_bytes(whole)
    assert not out.exists()
