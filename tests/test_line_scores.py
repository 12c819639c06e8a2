"""`evaluate --line_scores`: each line's pseudo-log-likelihood, as Transformers' models give it, line by line."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from d2l_bert.__main__ import main


pytestmark = pytest.mark.usefixtures("one_thread")

LINES = [
    "Then Anna sold the apple in the garden, and nobody knew.",
    "apple apple garden Boris",
    "",
    "The valley was old.",
    "☃ ☃",
    "Boris found ☃ in the library of the old harbour, and Clara walked to the market with a drum.",
]


@pytest.fixture(scope="module")
def reader(trained):
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForMaskedLM.from_pretrained(trained)
    return SimpleNamespace(tokenizer=tokenizer, model=model.eval(), folder=trained)


@torch.no_grad()
def expected(reader, line, apart):
    """Score, tokens scored and `[UNK]`, in a loop over groups of tokens; `apart` 0 is each token alone."""
    limit = reader.model.config.max_position_embeddings
    ids = reader.tokenizer(line, truncation=True, max_length=limit, return_tensors="pt")["input_ids"][0]
    special = {reader.tokenizer.cls_token_id, reader.tokenizer.sep_token_id, reader.tokenizer.unk_token_id}
    places = [place for place, number in enumerate(ids.tolist()) if number not in special]
    total = 0.0
    for first in range(min(apart or len(places), len(places))):
        group = places[first :: apart or len(places)]
        masked = ids.clone()
        masked[group] = reader.tokenizer.mask_token_id
        chances = reader.model(masked[None]).logits[0].log_softmax(-1)
        total += sum(float(chances[place, ids[place]]) for place in group)
    return total, len(places), int((ids == reader.tokenizer.unk_token_id).sum())


@pytest.mark.parametrize("apart", [7, 3, 0])
def test_scores_are_those_of_a_loop_over_each_line(reader, tmp_path, capsys, apart):
    lines = [*LINES, " ".join([LINES[0]] * 9)]  # the last has more tokens than the model has positions
    (tmp_path / "lines.log").write_text("\n".join(lines) + "\n")
    options = [f"--line_scores={tmp_path / 'lines.log'}", f"--line_masks={apart}"]
    assert main(["evaluate", str(reader.folder), *options]) == 0
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line for *_, line in shown] == lines
    assert [int(row[4]) for row in shown] == list(range(1, len(lines) + 1))
    for row, line in zip(shown, lines, strict=True):
        of_token, total, of_word, unknown = map(float, row[:4])
        score, tokens, of_unknown = expected(reader, line, apart)
        if tokens:
            assert total == pytest.approx(score, abs=2e-3)
            assert of_token == pytest.approx(score / tokens, abs=2e-3)
            limit = reader.model.config.max_position_embeddings
            read = reader.tokenizer(line, truncation=True, max_length=limit, return_offsets_mapping=True)
            words = line[: max(end for _, end in read["offset_mapping"])].split()
            assert of_word == pytest.approx(score / len(words), abs=2e-3)
        else:
            assert {of_token, total, of_word} == {-math.inf}
        assert unknown == pytest.approx(of_unknown / max(1, tokens + of_unknown), abs=1e-4)


def test_rows_of_a_table_are_scored_and_nothing_else_stands_beside_them(reader, tmp_path, capsys, fails):
    (tmp_path / "rows.csv").write_text("message,id\nThe valley was old.,1\n,2\n")
    options = [f"--line_scores={tmp_path / 'rows.csv'}", "--text_column=message"]
    assert main(["evaluate", str(reader.folder), *options]) == 0
    assert [line.split("\t")[5] for line in capsys.readouterr().out.splitlines()] == ["The valley was old.", ""]
    assert "one model" in fails("evaluate", reader.folder, reader.folder, *options)
    for more in (f"--output={tmp_path / 'figures.json'}", "--score=within_word_l2r"):
        assert "alone" in fails("evaluate", reader.folder, *options, more)
