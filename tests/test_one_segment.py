"""How much one segment alone tells of the label: all of it where it does, chance where it does not."""

import numpy as np
import pytest
from stores import write_store

from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training.data.pairs import NO_LABEL, PAIR, one_segment_accuracy


def pairs_of(count, seed):
    """Pairs of two sentences of 9 random tokens each, with random labels; every fifth has no label."""
    rng = np.random.default_rng(seed)
    pairs = np.zeros(count, dtype=PAIR)
    for number, name in enumerate(("a_start", "a_end", "b_start", "b_end")):
        pairs[name] = np.arange(count) * 20 + (0, 9, 10, 19)[number]
    pairs["next_sentence_label"] = np.where(np.arange(count) % 5, rng.integers(0, 2, count), NO_LABEL)
    return pairs, rng.integers(10, 300, 20 * count)


@pytest.mark.parametrize("tells", ["a token of A", "A's first", "B's last", "B's length", "nothing"])
def test_one_segment_alone(tmp_path, tells):
    pairs, ids = pairs_of(2000, seed=1)
    with_label, others = (pairs[pairs["next_sentence_label"] == label] for label in (1, 0))
    if tells == "B's length":
        pairs["b_end"] -= 4 * (pairs["next_sentence_label"] == 1)
    places = {"a token of A": with_label["a_start"] + 4, "A's first": with_label["a_start"]}
    places |= {"B's last": with_label["b_end"] - 1}
    if tells in places:
        ids[places[tells]] = 5
    if tells in ("A's first", "B's last"):  # the others have the token, too, in another place
        ids[others[f"{tells[0].lower()}_start"] + 4] = 5
    corpus = TokenizedCorpus(write_store(tmp_path / "store", [[20] * 2000], ids=ids))
    np.random.default_rng(0).shuffle(pairs)
    found = one_segment_accuracy(corpus, pairs, entries=300)
    if tells == "nothing":
        assert found == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(1600))
    else:
        assert found > 0.8
