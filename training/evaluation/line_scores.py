"""`evaluate --line_scores`: how likely a model finds each line of a file, so that the oddest lines come first."""

import itertools

import numpy as np
from accelerate import Accelerator

from d2l_bert.tokenization import sources
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.pseudo_likelihood import encode, pseudo_log_likelihoods


LINES_AT_ONCE = 2**14


def print_line_scores(model: MaskedModel, config: EvaluateConfig, accelerator: Accelerator) -> None:
    """
    Print a line for each line or row of the file `config.line_scores`, in the file's order, with tabs between:

    the mean log-likelihood of a token, the sum, and the mean of a word between white space, in nats; the share of the
    tokens that are `[UNK]`; the number of the line from 1; and its text. A line without a token to score has `-inf`
    for its scores, and so comes first where lines are sorted by number. What is beyond the model's positions is cut
    off.

    Raises:
        UserError: as in `sources.lines_and_cells`.
    """
    model.backend.enable_truncation(model.most_positions)
    lines = (line for line, _ in sources.lines_and_cells(config.line_scores, config.text_column, config.separator))
    count = 0
    while group := list(itertools.islice(lines, LINES_AT_ONCE)):
        encoded = encode(model, group)
        title = f"{model.name} on {config.line_scores}"
        scores = pseudo_log_likelihoods(model, encoded, config, accelerator, title, config.line_masks).numpy()
        unknown = np.array([(ids == model.tokenizer.unk_token_id).sum() for ids in encoded.ids])[encoded.numbers]
        counts = (encoded.scored_tokens(), encoded.read_words, unknown)
        for line, score, scored, read, of_unknown in zip(group, scores, *counts, strict=True):
            count += 1
            means = [score / scored, score, score / read] if scored else [-np.inf] * 3
            shown = [*(f"{mean:.4f}" for mean in means), f"{of_unknown / max(1, scored + of_unknown):.4f}", f"{count}"]
            if accelerator.is_main_process:
                print(*shown, line.replace("\t", " "), sep="\t")
