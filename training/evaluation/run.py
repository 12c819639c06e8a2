"""`d2l-bert evaluate`: figures of masked language models on a text and on minimal pairs, side by side."""

import functools
import importlib.metadata
import logging
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from d2l_bert.folders import write_json
from d2l_bert.messages import UserError, report, writing
from d2l_bert.model_cards.evaluations import check_updatable, update_folder
from d2l_bert.model_cards.figures import SCORES
from d2l_bert.model_cards.pictures import draw_bars
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.account import unknown_share
from d2l_bert.training import devices
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.devices import main_first, on_main, restore_host_settings, together
from d2l_bert.training.evaluation.blimp import Paradigm, blimp_results, read_blimp, sentences_of
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel, check_lengths, load_masked_model
from d2l_bert.training.evaluation.pseudo_likelihood import encode, scores_of_all
from d2l_bert.training.evaluation.text import (
    check_model_for_text,
    evaluate_text,
    held_out_run,
    pseudo_perplexity,
    read_text,
    recorded_run,
)


logger = logging.getLogger(__name__)


@restore_host_settings()
def evaluate(names: Sequence[str], config: EvaluateConfig) -> dict | None:
    """
    Evaluate models on a text, on minimal pairs, or on both, in float32.

    Args:
        names: folders or Hub ids of masked language models.
        config: what to evaluate them on, and where to write the figures.

    Returns:
        The content of the file `config.output`: `versions`, `options`, `text` (the text's name) and `models`. Each
        model has its `model` (the name given), `class`, `parameters`, and as far as they were asked for `text`
        (`text.evaluate_text`, with pseudo-perplexity) and `blimp` (`blimp.blimp_results`, with `score`), each with
        `unknown_share`, the share of its characters in `[UNK]` (of a text, in the sample `EvaluationText.sample`).
        None in all processes but the main one.

    Raises:
        UserError: something that the user can fix, in one line.
        SystemExit: in a run of several processes, the main process has raised an error, and shows it.
    """
    transformers_logging.disable_progress_bar()
    devices.start_processes()
    with together():
        config.check()
        for name in names if config.update_card else ():
            check_updatable(name)
        accelerator = devices.make_accelerator("no")
        models = [load_masked_model(name) for name in names]
        if config.has_text():
            for model in models:
                check_model_for_text(model, config)
            shortest = min(recorded_run(model).max_seq_length for model in models)
            length = check_lengths(models, config.max_seq_length, shortest)
            run = held_out_run(models) if config.held_out else PretrainConfig()
    paradigms = on_main(read_blimp, config.blimp) if config.blimp else []
    with together():
        encoded_pairs = [_encode_pairs(model, paradigms, config) for model in models] if paradigms else []
    text = sentences = None
    if config.has_text():
        text = main_first(read_text, config, run)
        sentences = text.sentences(config.pppl_sentences, models, length) if config.pppl_sentences else []
        if config.pppl_sentences and not sentences:
            logger.warning(
                f"no pseudo-perplexity: each sentence of {text.name} has no word without [UNK], or more tokens than "
                f"max_seq_length ({length}); give shorter sentences, or a larger max_seq_length"
            )
    results = []
    for number, model in enumerate(models):
        start = time.monotonic()
        model.to(accelerator.device)
        figures = {
            "model": model.name,
            "class": type(model.model).__name__,
            "parameters": model.model.num_parameters(),
        }
        if text is not None:
            with together():
                figures["text"] = evaluate_text(model, text, config, length, accelerator)
            figures["text"]["unknown_share"] = unknown_share(model.tokenizer, text.sample())
            if sentences:
                figures["text"] |= pseudo_perplexity(model, sentences, config, accelerator)
        if paradigms:
            scores = scores_of_all(model, encoded_pairs[number], config, accelerator, f"{model.name} on BLiMP")
            figures["blimp"] = {
                "score": config.score,
                "unknown_share": unknown_share(model.tokenizer, sentences_of(paradigms)),
                **blimp_results(paradigms, scores.numpy()),
            }
        results.append(figures)
        model.to("cpu")
        logger.info(f"{model.name}: evaluated in {time.monotonic() - start:.0f} s")
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers")
    content = {
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "options": {**asdict(config), **({"max_seq_length": length} if text else {})},
        "text": text.name if text else None,
        "models": results,
    }
    on_main(_write, content, config)
    devices.shut_down(accelerator)
    return content if accelerator.is_main_process else None


def _encode_pairs(model: MaskedModel, paradigms: Sequence[Paradigm], config: EvaluateConfig):
    """The sentences of all minimal pairs as the model reads them; a `UserError` for one that is too long for it."""
    sentences = sentences_of(paradigms)
    encoded = encode(model, sentences, config.score)
    unfit = np.flatnonzero((encoded.lengths() > model.most_positions) | (encoded.scored_tokens() == 0))
    if len(unfit):
        raise UserError(
            f"{model.name} has {model.most_positions} positions, and {encoded.lengths()[unfit[0]]} tokens, or none "
            f"beside special ones and [UNK], in the sentence {sentences[unfit[0]]!r:.60}; take the sentence out"
        )
    return encoded


def _write(content, config: EvaluateConfig) -> None:
    """Show the table; then write the JSON file, the picture and the models' cards that the options ask for."""
    report.info(evaluation_table(content))
    with writing(config.output or config.picture(), ", or name another file"):
        if config.output is not None:
            write_json(Path(config.output), content)
            logger.info(f"wrote {config.output}")
        if (picture := config.picture()) is not None:
            names = short_names([figures["model"] for figures in content["models"]])
            results = [figures["blimp"] for figures in content["models"]]
            plot_phenomena(list(zip(names, results, strict=True)), picture)
            logger.info(f"wrote {picture}")
    if config.update_card:
        for figures in content["models"]:
            update_folder(Path(figures["model"]), content["text"], figures.get("text"), figures.get("blimp"))
            logger.info(f"{figures['model']}: wrote the figures into metrics.json and README.md")


# ---------------------------------------------------------------------------------------------------------------------
# The table and the picture


LABEL_WIDTH = 38
NOTHING = "-"


def evaluation_table(content: dict) -> str:
    """
    The figures as text for the terminal.

    Args:
        content: what `evaluate` returned.
    """
    models = content["models"]
    short = short_names([model["model"] for model in models])
    rows = [("", short), ("parameters", [f"{model['parameters']:,}" for model in models])]
    if content["text"] is not None:
        rows += [None, (f"Text: {content['text']}", []), *_text_rows([model["text"] for model in models])]
    if "blimp" in models[0]:
        results = [model["blimp"] for model in models]
        pairs, paradigms = results[0]["pairs"], results[0]["paradigm_count"]
        rows += [None, (f"BLiMP, score {results[0]['score']}: {pairs:,} pairs in {paradigms} of 67 paradigms", [])]
        rows.append(_row(results, "  characters in [UNK]", "unknown_share", ".1%"))
        figures = {"  accuracy": results}
        for name in results[0]["phenomena"]:
            figures[f"    {name.replace('_', ' ')}"] = [blimp["phenomena"][name] for blimp in results]
        for label, of_models in figures.items():
            shares = [(100 * each["accuracy"], 100 * each["standard_error"]) for each in of_models]
            rows.append((label, [f"{accuracy:.1f} ± {error:.1f} %" for accuracy, error in shares]))
    width = max(14, *(len(cell) for row in rows if row for cell in row[1]))
    lines = [
        "" if row is None else (f"{row[0]:<{LABEL_WIDTH}}" + "".join(f"  {cell:>{width}}" for cell in row[1])).rstrip()
        for row in rows
    ]
    return "\n".join(lines + _notes(content))


def short_names(names: list[str]) -> list[str]:
    """The last parts of folders and Hub ids; the whole names if two last parts are the same."""
    names = [name.rstrip("/") for name in names]
    short = [name.rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(short) else names


def _row(figures, label, key, form):
    return label, [format(of[key], form) if of.get(key) is not None else NOTHING for of in figures]


def _text_rows(texts):
    row = functools.partial(_row, texts)
    rows = [
        row("  characters in [UNK]", "unknown_share", ".1%"),
        row("  MLM loss (nats a token)", "mlm_loss", ".3f"),
        row("  MLM perplexity", "perplexity", ",.1f"),
        row("  MLM accuracy", "mlm_accuracy", ".1%"),
        row("  MLM top-5 accuracy", "mlm_top_5_accuracy", ".1%"),
        row("  masked tokens", "masked_tokens", ",d"),
    ]
    for key in filter(None, dict.fromkeys(text["pair_task"] for text in texts)):
        rows.append(row(f"  {PAIR_TASKS[key].short} loss", f"{key}_loss", ".3f"))
        rows.append(row(f"  {PAIR_TASKS[key].short} accuracy", f"{key}_accuracy", ".1%"))
        rows.append(row("    of one segment alone", f"{key}_one_segment_accuracy", ".1%"))
    rows.append(("  pairs, or single segments", [f"{text.get('pairs', text.get('sequences')):,}" for text in texts]))
    if "pseudo_perplexity" in texts[0]:
        rows.append(row("  pseudo-perplexity of a word", "pseudo_perplexity", ",.1f"))
        rows.append(row("    its sentences", "pppl_sentences", ",d"))
        rows.append(row("    their words without [UNK]", "pppl_words", ",d"))
        rows.append(row("    the tokens of these words", "pppl_tokens", ",d"))
    return rows


def _notes(content):
    notes, models = [], content["models"]
    if content["text"] is not None:
        inputs = {model["text"]["pair_task"] for model in models}
        if len(inputs) > 1:
            notes.append(
                "The models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
                "--objective none all MLM figures are on single segments."
            )
        if len({model["text"]["tokens"] for model in models}) > 1:
            notes.append(
                "The models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses "
                "and perplexities of tokens."
            )
    return ["", *notes] if notes else []


def plot_phenomena(results: Sequence[tuple[str, dict]], path: Path) -> None:
    """
    Draw the accuracies by phenomenon, and over all paradigms, with standard errors, into a PNG.

    Args:
        results: for each model its name, and its results (`blimp.blimp_results`, with `score`). All models have the
            same phenomena.
    """
    names, (first, *_) = [textwrap.shorten(name, 60) for name, _ in results], [blimp for _, blimp in results]
    rows = {"all paradigms": [blimp for _, blimp in results]}
    rows |= {name: [blimp["phenomena"][name] for _, blimp in results] for name in first["phenomena"]}
    groups = [
        (f"{name.replace('_', ' ')} ({row[0]['paradigm_count']})", [figures["accuracy"] for figures in row])
        for name, row in rows.items()
    ]
    title = (
        f"BLiMP: how often a model prefers the grammatical sentence of a minimal pair; {first['pairs']:,} pairs in "
        f"{first['paradigm_count']} of 67 paradigms; {SCORES[first['score']]}"
    )
    errors = np.array([[figures["standard_error"] for figures in row] for row in rows.values()])
    draw_bars(groups, names, title, path, errors, chance=0.5)
