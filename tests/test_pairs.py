"""Pairs of segments: they fit, true pairs are consecutive text, labels are balanced, no sentence is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_corpora import (
    IS_NEXT,
    IS_RANDOM,
    STEADY_LENGTH,
    Corpus,
    any_pairs,
    assert_balanced,
    both_pairings,
    corpora,
    lengths_of,
    steady_corpus,
)

from d2l_bert.training import pairs as made_by
from d2l_bert.training.pairs import SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT


# ---------------------------------------------------------------------------------------------------------------------
# What holds for every pair


@given(any_pairs())
def test_every_pair_fits_and_both_spans_lie_within_their_documents(case):
    corpus, pairs, capacity = case
    a, b = lengths_of(pairs)
    assert (a >= 1).all() and (b >= 1).all()
    assert (a + b <= capacity).all()
    for side in ("a", "b"):
        assert (pairs[f"{side}_start"] >= 0).all()
        for document, end in zip(pairs[f"{side}_document"], pairs[f"{side}_end"], strict=True):
            assert end <= corpus.ends[document][-1]


@given(any_pairs())
def test_a_true_pair_is_consecutive_text_cut_only_at_the_ends_of_its_spans(case):
    corpus, pairs, capacity = case
    for pair in pairs[pairs["next_sentence_label"] == IS_NEXT]:
        document = pair["a_document"]
        assert pair["b_document"] == document
        if corpus.are_parts_of_a_sentence(pair):
            continue
        # A sentence ends where A and B met before truncation.
        ends = corpus.ends[document]
        assert ((pair["a_end"] <= ends) & (ends <= pair["b_start"])).any()
        whole_a = corpus.are_whole_sentences(document, pair["a_start"], pair["a_end"])
        whole_b = corpus.are_whole_sentences(document, pair["b_start"], pair["b_end"])
        if not (whole_a and whole_b and pair["b_start"] == pair["a_end"]):
            assert (pair["a_end"] - pair["a_start"]) + (pair["b_end"] - pair["b_start"]) == capacity, (
                "cut, but not full"
            )


@given(any_pairs(min_documents=2))
def test_a_random_pair_takes_b_from_another_document_if_there_is_one(case):
    _, pairs, _ = case
    random = pairs[pairs["next_sentence_label"] == IS_RANDOM]
    assert (random["a_document"] != random["b_document"]).all()


@given(any_pairs())
def test_the_longer_span_is_truncated(case):
    corpus, pairs, capacity = case
    for pair, a, b in zip(pairs, *lengths_of(pairs), strict=True):
        whole_a = corpus.are_whole_sentences(pair["a_document"], pair["a_start"], pair["a_end"])
        whole_b = corpus.are_whole_sentences(pair["b_document"], pair["b_start"], pair["b_end"])
        if corpus.are_parts_of_a_sentence(pair):
            continue
        # The shorter span is truncated only if the longer one has one token of each outer sentence left.
        if not whole_a and b > a + 1:
            assert pair["next_sentence_label"] == IS_NEXT, "a random B has nothing to lose"
            assert corpus.has_a_token_of_each_outer_sentence(pair["b_document"], pair["b_start"], pair["b_end"])
        if not whole_b and a > b + 1:
            assert corpus.has_a_token_of_each_outer_sentence(pair["a_document"], pair["a_start"], pair["a_end"])


def test_tokens_are_cut_from_the_front_and_from_the_back():
    corpus = Corpus([[200, 200]] * 300)
    pairs = corpus.segment_pairs(20 + SPECIALS_IN_A_PAIR, short_seq_prob=0)
    a, b = lengths_of(pairs)
    assert (a == 10).all() and (b == 10).all()
    # Each A loses 190 tokens, half of them at its front: a binomial number with standard deviation sqrt(190) / 2.
    into_sentence = pairs["a_start"] % 200
    assert abs(into_sentence.mean() - 95) < 3 * np.sqrt(190) / 2 / np.sqrt(len(pairs))
    assert into_sentence.std() == pytest.approx(np.sqrt(190) / 2, rel=0.2)


@both_pairings
def test_the_same_seed_gives_the_same_pairs_and_another_seed_others(pairing):
    corpus = steady_corpus()
    first, again, other = (corpus.pairs(pairing, STEADY_LENGTH, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(other) or (first != other).mean() > 0.9


@both_pairings
def test_pairs_come_only_from_the_documents_given(pairing):
    named = [3, 17, 40, 41]
    pairs = steady_corpus().pairs(pairing, STEADY_LENGTH, documents=named)
    assert set(pairs["a_document"]) == set(named)
    assert set(pairs["b_document"]) <= set(named)


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@both_pairings
def test_labels_are_balanced(pairing):
    assert_balanced(steady_corpus().pairs(pairing, STEADY_LENGTH))


def uneven_documents():
    """300 documents of one sentence and 300 longer ones, with sentences of 3 to 29 tokens."""
    rng = np.random.default_rng(0)
    documents = [[int(rng.integers(3, 30))] for _ in range(300)]
    return documents + [rng.integers(3, 30, rng.integers(20, 60)).tolist() for _ in range(300)]


@pytest.mark.parametrize("max_seq_length", [32, 64, 256])
def test_labels_are_balanced_in_spite_of_many_documents_of_one_sentence(max_seq_length):
    assert_balanced(Corpus(uneven_documents()).segment_pairs(max_seq_length))


def test_labels_are_balanced_if_most_sentences_fill_the_length_alone():
    assert_balanced(Corpus(uneven_documents()).segment_pairs(16))


def test_documents_of_one_sentence_are_balanced_too():
    pairs = Corpus([[5]] * 2000).segment_pairs(32)
    assert len(pairs) == 2000
    # The first pairs get a random B, as in the original BERT. True pairs never catch up, so half the rest is random.
    assert abs(pairs["next_sentence_label"].sum() - 1000) < 3 * 0.5 * np.sqrt(2000) + made_by.MOST_OWED
    true = pairs[pairs["next_sentence_label"] == IS_NEXT]
    assert (true["a_start"] == 0).all() and (true["b_start"] == true["a_end"]).all() and (true["b_end"] == 5).all()
    assert set(true["a_end"]) == {1, 2, 3, 4}
    one_word = Corpus([[1]] * 50).segment_pairs(32)
    assert (one_word["next_sentence_label"] == IS_RANDOM).all() and len(one_word) == 50


def test_labels_are_balanced_in_spite_of_documents_of_one_token():
    rng = np.random.default_rng(0)
    documents = [[1] if rng.random() < 0.05 else [int(rng.integers(2, 30))] for _ in range(4000)]
    labels = Corpus(documents).segment_pairs(64)["next_sentence_label"]
    # A document of one token always gets a random B, also in the half of the cases where the coin says otherwise.
    assert abs(labels.sum() - 2000 - 100) < 3 * 0.5 * np.sqrt(4000) + made_by.MOST_OWED


def is_true_continuation(pair):
    return pair["b_document"] == pair["a_document"] and pair["b_start"] == pair["a_end"]


@both_pairings
def test_a_random_b_from_the_only_document_is_never_the_true_continuation(pairing):
    corpus = Corpus([[3] * 10])  # small, so that chance would often hit the continuation
    made = np.concatenate([corpus.pairs(pairing, STEADY_LENGTH, seed) for seed in range(200)])
    random = made[made["next_sentence_label"] == IS_RANDOM]
    assert len(random) > 100
    assert not any(is_true_continuation(pair) for pair in random)


@both_pairings
def test_a_random_b_from_the_only_document_does_not_overlap_a(pairing):
    corpus = Corpus([[3] * 30])
    made = np.concatenate([corpus.pairs(pairing, STEADY_LENGTH, seed) for seed in range(50)])
    random = made[made["next_sentence_label"] == IS_RANDOM]
    assert ((random["b_end"] <= random["a_start"]) | (random["b_start"] > random["a_end"])).all()


@both_pairings
def test_truncation_does_not_turn_a_random_b_into_the_true_continuation(pairing):
    corpus = Corpus([[7, 20, 3, 11, 16, 5, 9, 30, 4, 6]])
    made = np.concatenate([corpus.pairs(pairing, 16, seed) for seed in range(200)])
    random = made[made["next_sentence_label"] == IS_RANDOM]
    assert len(random) > 100
    assert not any(is_true_continuation(pair) for pair in random)


# ---------------------------------------------------------------------------------------------------------------------
# Segments


def test_untruncated_segments_are_whole_sentences_and_true_pairs_are_adjacent():
    corpus = steady_corpus()
    pairs = corpus.segment_pairs(STEADY_LENGTH, short_seq_prob=0)
    for pair in pairs:
        for side in ("a", "b"):
            span = (pair[f"{side}_document"], pair[f"{side}_start"], pair[f"{side}_end"])
            assert corpus.are_whole_sentences(*span)
        assert (pair["next_sentence_label"] == IS_NEXT) == is_true_continuation(pair)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    sentence=st.integers(1, 4),
    sentences_in_a_pair=st.integers(2, 9),
    seed=st.integers(0, 2**32),
)
def test_a_spans_and_true_b_spans_cover_every_document_exactly_once(sizes, sentence, sentences_in_a_pair, seed):
    """Nothing is truncated here. Sentences that a random B replaces are used again in a later pair."""
    corpus = Corpus([[sentence] * size for size in sizes])
    pairs = corpus.segment_pairs(sentences_in_a_pair * sentence + SPECIALS_IN_A_PAIR, seed, short_seq_prob=0)
    for document, size in enumerate(sizes):
        mine = pairs[pairs["a_document"] == document]
        true = mine[mine["next_sentence_label"] == IS_NEXT]
        spans = [*zip(mine["a_start"], mine["a_end"], strict=True), *zip(true["b_start"], true["b_end"], strict=True)]
        covered = [token for start, end in sorted(spans) for token in range(start, end)]
        assert covered == list(range(size * sentence))


@given(corpora(), st.integers(5, 40), st.integers(0, 2**32))
def test_every_document_is_used(corpus, capacity, seed):
    pairs = corpus.segment_pairs(capacity + SPECIALS_IN_A_PAIR, seed)
    assert set(pairs["a_document"]) == set(range(len(corpus)))


def test_segments_fill_the_length_unless_their_document_ends():
    corpus = steady_corpus()
    pairs = corpus.segment_pairs(STEADY_LENGTH, short_seq_prob=0)
    a, b = lengths_of(pairs)
    b_ends_its_document = [pair["b_end"] == corpus.ends[pair["b_document"]][-1] for pair in pairs]
    full = a + b == STEADY_LENGTH - SPECIALS_IN_A_PAIR
    # The last sentence of a document, if left alone, may get a random B; that B fills the length as well.
    assert (full | b_ends_its_document).all()
    assert full.mean() > 0.8


def test_every_boundary_between_a_and_b_is_equally_likely():
    pairs = Corpus([[1] * 20_000]).segment_pairs(8 + SPECIALS_IN_A_PAIR, short_seq_prob=0)
    a, _ = lengths_of(pairs)
    counts = np.bincount(a, minlength=8)
    assert counts[0] == 0 and len(counts) == 8
    expected = len(pairs) / 7
    assert np.abs(counts[1:] - expected).max() < 4 * np.sqrt(expected * 6 / 7)


def test_short_seq_prob_is_the_share_of_short_pairs():
    corpus = Corpus([[1] * 500] * 40)
    capacity = 50

    def share_short(probability):
        pairs = corpus.segment_pairs(capacity + SPECIALS_IN_A_PAIR, short_seq_prob=probability)
        # One in 49 of the lengths drawn from 2 to 50 is the full one. Pairs at the end of a document are short anyway.
        a, b = lengths_of(pairs)
        last = [pair["b_end"] == 500 or pair["a_end"] == 500 for pair in pairs]
        return (a + b < capacity)[~np.array(last)].mean()

    assert share_short(0) == 0
    assert share_short(1) == pytest.approx(48 / 49, abs=0.02)
    assert share_short(0.1) == pytest.approx(0.1 * 48 / 49, abs=0.04)


# ---------------------------------------------------------------------------------------------------------------------
# Sentences

UNTRUNCATED = 24 + SPECIALS_IN_A_PAIR  # twice the longest sentence of `corpora`


@given(corpora(), st.integers(0, 2**32), st.sampled_from(["nsp", "sop", "none"]))
def test_each_sentence_but_the_last_of_its_paragraph_is_segment_a_once(corpus, seed, objective):
    expected = [
        (document, sentence)
        for document, paragraphs in enumerate(corpus.paragraphs)
        for sentence in range(len(corpus.ends[document]))
        if sentence + 1 not in paragraphs or objective == "none"
    ]
    firsts = []
    for pair in corpus.sentence_pairs(UNTRUNCATED, seed, objective=objective):
        spans = {side: (pair[f"{side}_document"], pair[f"{side}_start"], pair[f"{side}_end"]) for side in ("a", "b")}
        if objective == "sop" and spans["a"][1] > spans["b"][1]:
            spans["a"] = spans["b"]
        document, sentence = spans["a"][0], corpus.sentence_at(*spans["a"][:2])
        # A paragraph of one sentence also has that sentence, or half of it, as A.
        if sentence + 1 not in corpus.paragraphs[document] or objective == "none":
            assert corpus.are_whole_sentences(*spans["a"])
            firsts.append((document, sentence))
    assert sorted(firsts) == expected


@given(corpora(), st.integers(0, 2**32))
def test_a_true_pair_of_sentences_is_two_neighbours_of_a_paragraph_or_two_parts_of_a_sentence(corpus, seed):
    for pair in corpus.sentence_pairs(UNTRUNCATED, seed):
        if pair["next_sentence_label"] == IS_NEXT:
            assert is_true_continuation(pair)
            document, first = pair["a_document"], corpus.sentence_at(pair["a_document"], pair["a_start"])
            if corpus.ends[document][first] == pair["a_end"]:
                assert corpus.sentence_at(document, pair["b_start"]) == first + 1
                assert pair["b_end"] == corpus.ends[document][first + 1], "one whole sentence"
                assert first + 1 not in corpus.paragraphs[document], "a paragraph ends between them"
            else:
                assert pair["b_end"] == corpus.ends[document][first], "the rest of the sentence"
        else:
            sentence = corpus.sentence_at(pair["b_document"], pair["b_start"])
            assert pair["b_end"] == corpus.ends[pair["b_document"]][sentence], "one whole sentence"


def covered(corpus, pairs):
    """For each document, an array that says of each token whether some pair contains it."""
    found = [np.zeros(ends[-1], dtype=bool) for ends in corpus.ends]
    for pair in pairs:
        for side in ("a", "b"):
            found[pair[f"{side}_document"]][pair[f"{side}_start"] : pair[f"{side}_end"]] = True
    return found


@given(corpora(), st.integers(5, 60), st.integers(0, 2**32), st.sampled_from(["segments", "sentences"]))
def test_segments_without_a_second_loss_hold_every_token(corpus, capacity, seed, pairing):
    options = {"short_seq_prob": 0.0} if pairing == "segments" else {}
    found = covered(corpus, corpus.pairs(pairing, capacity + SPECIALS_IN_A_PAIR, seed, objective="none", **options))
    assert all(tokens.all() for tokens in found)


def test_paragraphs_of_one_sentence_become_the_random_sentences_of_other_pairs():
    dialogue, story = [[6], [7], [8]] * 100, [[10, 11, 12, 13, 14, 15, 16, 17]] * 200
    corpus = Corpus([*dialogue, *story], [[1]] * 300 + [[8]] * 200)
    pairs = corpus.sentence_pairs(64)
    spoken = pairs["b_document"] < 300
    assert len(np.unique(pairs["b_document"][spoken])) > 290, "all but the last to be visited"
    assert (pairs["next_sentence_label"][spoken] == IS_RANDOM).mean() > 0.98
    assert (pairs["a_document"] >= 300).mean() > 0.95, "hardly any stands in a pair of its own"
    assert_balanced(pairs)


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_if_all_paragraphs_have_one_sentence_each_sentence_is_cut_in_two(objective):
    corpus = Corpus([[9] * 30] * 60, [list(range(1, 31))] * 60)
    pairs = corpus.sentence_pairs(64, objective=objective)
    assert len(pairs) == 60 * 30
    assert_balanced(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Sentence order, and no pair objective


@both_pairings
def test_ordered_and_swapped_segments_are_neighbours_and_balanced(pairing):
    pairs = steady_corpus().pairs(pairing, STEADY_LENGTH, objective="sop")
    in_order = pairs["next_sentence_label"] == made_by.IN_ORDER
    assert (pairs["a_document"] == pairs["b_document"]).all()
    assert (pairs["a_end"] == pairs["b_start"])[in_order].all()
    assert (pairs["b_end"] == pairs["a_start"])[~in_order].all()
    assert_balanced(pairs)


@given(corpora(), st.integers(5, 40), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 1.0]))
def test_single_segments_cover_every_document_exactly_once(corpus, capacity, seed, share):
    length = capacity + SPECIALS_IN_A_SEGMENT
    pairs = corpus.segment_pairs(length, seed, objective="none", short_seq_prob=share)
    assert (pairs["next_sentence_label"] == made_by.NO_LABEL).all() and (pairs["b_start"] == pairs["b_end"]).all()
    sizes = pairs["a_end"] - pairs["a_start"]
    assert sizes.min() >= 1 and sizes.max() <= capacity
    for document, ends in enumerate(corpus.ends):
        mine = pairs[pairs["a_document"] == document]
        assert mine["a_start"].tolist() == [0, *mine["a_end"][:-1].tolist()] and mine["a_end"][-1] == ends[-1]


def test_single_segments_are_full_and_start_at_other_tokens_in_every_epoch():
    corpus = Corpus([[7] * 300] * 50)
    starts = []
    for seed in (0, 1):
        pairs = corpus.segment_pairs(64, seed, objective="none", short_seq_prob=0)
        full = pairs["a_end"] - pairs["a_start"] == 64 - SPECIALS_IN_A_SEGMENT
        assert full.mean() > 0.93  # all but the first and the last of a document
        starts.append(pairs["a_start"])
    assert np.isin(*starts).mean() < 0.9


@given(corpora(), st.integers(2, 20), st.integers(0, 2**32))
def test_single_sentences_that_are_too_long_are_cut_into_pieces(corpus, capacity, seed):
    pairs = corpus.sentence_pairs(capacity + SPECIALS_IN_A_SEGMENT, seed, objective="none")
    assert (pairs["a_end"] - pairs["a_start"]).max() <= capacity
    assert all(tokens.all() for tokens in covered(corpus, pairs))
    assert (pairs["a_end"] - pairs["a_start"]).sum() == sum(int(ends[-1]) for ends in corpus.ends)
