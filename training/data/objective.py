"""The second loss that suits a text: NSP, or none where the text would have few pairs."""

import dataclasses
import logging

from d2l_bert.messages import UserError
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.data.pairs import NO_LABEL, tokens_in


logger = logging.getLogger(__name__)

# A run has no second loss where a smaller share of the rows would be pairs, ...
LEAST_SHARE_OF_PAIRS = 0.5

# ... or where rows would hold a smaller share of the tokens of the text.
LEAST_SHARE_KEPT = 0.5


def with_objective(run, text):
    """
    The options of a run on a `PreparedText`: the objective `auto` becomes `nsp`, or `none` where few rows of the text
    would have a label, or cutting the pairs would lose most of it.

    A document of one sentence is a row without a label. Says how many rows have one, and how many of the tokens are in
    rows, measured on the first window with a row.

    Raises:
        UserError: few rows would have a label of the objective that the user asked for.
    """
    if run.objective == "none":
        return run
    objective = "nsp" if run.objective == "auto" else run.objective
    run_on_pairs = dataclasses.replace(run, objective=objective)
    short = PAIR_TASKS[objective].short
    epoch_pairs = EpochPairs(text.train, run_on_pairs, run.max_seq_length, text.corpus_name)
    for number in range(epoch_pairs.window_count(0)):
        rows = epoch_pairs.window(0, number)
        if len(rows):
            break
    has_label = rows["next_sentence_label"] != NO_LABEL
    firsts, ends = epoch_pairs.pieces(0, number)
    share_kept = _share_kept(text.train, rows, firsts, ends)
    reason = _reason_against(run, rows, share_kept, short)
    if reason is None:
        logger.info(
            f"{has_label.sum() / max(len(rows), 1):.1%} of the rows are pairs with a label for {short}; rows of "
            f"{run.max_seq_length} hold {share_kept:.0%} of the tokens, the others are cut off"
        )
        return run_on_pairs
    if run.objective != "auto":
        raise UserError(
            f"objective {run.objective}: {reason}; give objective none, or documents of several sentences (see "
            f"documents)"
        )
    logger.warning(f"objective none: {reason}")
    return dataclasses.replace(run, objective="none")


def _reason_against(run, rows, share_kept, short):
    """
    Why a run has no second loss, or None if it has.

    Args:
        rows: an array of `PAIR`.
        share_kept: the share of the text's tokens that rows hold.
        short: the short name of the second loss.
    """
    if not len(rows):
        return None  # the run is refused later, whatever its objective
    share_of_pairs = (rows["b_end"] > rows["b_start"]).mean()
    if share_of_pairs < LEAST_SHARE_OF_PAIRS:
        return f"only {share_of_pairs:.1%} of the rows would be pairs for {short}: most documents have one sentence"
    if (rows["next_sentence_label"] == NO_LABEL).all():
        return f"no pair for {short} would have a label: all second segments are alike"
    # A user who asks for the second loss may lose more of the text.
    if run.objective == "auto" and share_kept < LEAST_SHARE_KEPT:
        return (
            f"pairs for {short} in rows of {run.max_seq_length} would hold {share_kept:.0%} of the tokens: sentences "
            f"are long"
        )
    return None


def _share_kept(corpus, rows, firsts, ends):
    """The share of the tokens that rows hold, of pieces with the sentences from `firsts` to `ends` - 1."""
    tokens = (corpus.sentence_starts[ends] - corpus.sentence_starts[firsts]).sum()
    return tokens_in(rows).sum() / max(tokens, 1)
