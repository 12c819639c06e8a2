"""What the pages show runs, and what they name exists."""

import re
from pathlib import Path

import pytest

import d2l_bert
from d2l_bert.cli import make_parser


ROOT = Path(__file__).parent.parent


def test_the_books_chapters_run_as_they_are_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "d2l.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "docs/d2l.md", "exec"), names)
    assert names["net"].config.vocab_size == len(names["tokenizer"])
    assert names["classifier"].config.type_vocab_size == 3


@pytest.mark.parametrize("page", ["README.md", "docs/d2l.md"])
def test_a_page_names_only_options_files_and_classes_that_exist(page):
    text = (ROOT / page).read_text()
    for command, options in re.findall(r"^    d2l-bert (\S+)(.*)$", text, re.MULTILINE):
        parser = make_parser([command])
        known = parser._subparsers._group_actions[0].choices[command]._option_string_actions
        assert set(re.findall(r"--\w+", options)) <= set(known), (command, options)
    for name in re.findall(r"\b(D2lBert\w+)\b", text):
        assert hasattr(d2l_bert, name), name
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
