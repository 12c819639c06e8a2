"""`d2l-bert evaluate`: figures of masked language models on a text and on minimal pairs, side by side."""

import dataclasses
import importlib.metadata
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from d2l_bert import folders, messages
from d2l_bert.model_cards import evaluations
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization import prepare
from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.sources import STDIN
from d2l_bert.training import devices
from d2l_bert.training.evaluation import line_scores, masked_models, minimal_pairs, pseudo_likelihood, runs_table, text
from d2l_bert.training.evaluation.config import EvaluateConfig


logger = logging.getLogger(__name__)

# Their versions decide the figures, and stand in the JSON file.
LIBRARIES = ("d2l-bert", "torch", "transformers", "tokenizers")


@devices.restore_host_settings()
def evaluate(names: Sequence[str], config: EvaluateConfig) -> dict | None:
    """
    Evaluate models on a text, on minimal pairs, or on both, in float32.

    Args:
        names: folders or Hub ids of masked language models.
        config: what to evaluate them on, and where to write the figures.

    Returns:
        The content of the file `config.output`: `versions`, `options`, `text` (the text's name) and `models`. Each
        model has its `model` (the name given), `class`, `parameters`, and as far as they were asked for `text`
        (`text.evaluate_text`, with pseudo-perplexity) and `blimp` (`minimal_pairs.blimp_results`, with `score`), each
        with `unknown_share`, the share of its characters in `[UNK]` (of a text, in a sample of `SAMPLED_CHARACTERS`).
        None in all processes but the main one.

    Raises:
        UserError: something that the user can fix, in one line.
        SystemExit: in a run of several processes, the main process has raised an error, and shows it.
    """
    transformers_logging.disable_progress_bar()
    devices.start_processes()
    with devices.together():
        config.check()
        for name in names if config.update_card else ():
            evaluations.check_updatable(name)
        accelerator = devices.make_accelerator("no")
        models = [masked_models.MaskedModel(name) for name in names]
        if config.line_scores:
            messages.refuse_first(
                {
                    "line_scores is for one model; name one": len(models) > 1,
                    "line_scores -: one process alone can read the standard input; give a file": (
                        config.line_scores == STDIN and accelerator.num_processes > 1
                    ),
                }
            )
            models[0].to(accelerator.device)
            line_scores.print_line_scores(models[0], config, accelerator)
            devices.shut_down(accelerator)
            return None
        if config.has_text():
            runs = [text.run_of(model, config) for model in models]
            positions, shortest = min((model.most_positions, model.name) for model in models)
            length = config.max_seq_length or min(positions, *(run.max_seq_length for run in runs))
            of_record = [run for run, model in zip(runs, models, strict=True) if model.record]
            messages.refuse_first(
                {
                    f"max_seq_length {length}: {shortest} has {positions} positions; give at most this many": (
                        length > positions
                    ),
                    f"{names[0]}: no run_config.json says which documents its run held out; leave held_out out, or "
                    f"name a model of pretrain first": config.held_out and not of_record,
                }
            )
    pairs = devices.on_main(minimal_pairs.read_blimp, config.blimp) if config.blimp else []
    with devices.together():
        encoded_pairs = [_encode_pairs(model, pairs, config) for model in models]
    read = sentences = None
    if config.has_text():
        read = devices.main_first(text.read_text, config, (of_record or runs)[0])
        sentences = text.sample_sentences(read, config.pppl_sentences, models, length)
        if config.pppl_sentences and not sentences:
            logger.warning(
                f"no pseudo-perplexity: each sentence of {read.name} has no word without [UNK], or more tokens than "
                f"max_seq_length ({length}); give shorter sentences, or a larger max_seq_length"
            )
    results = []
    for model, encoded in zip(models, encoded_pairs, strict=True):
        model.to(accelerator.device)
        figures = {
            "model": model.name,
            "class": type(model.model).__name__,
            "parameters": model.model.num_parameters(),
        }
        if read:
            with devices.together():
                figures["text"] = text.evaluate_text(model, read, config, length, accelerator)
            figures["text"]["unknown_share"] = unknown_share(
                model.tokenizer, read.part.sample(prepare.SAMPLED_CHARACTERS)
            )
            if sentences:
                figures["text"] |= text.pseudo_perplexity(model, sentences, config, accelerator)
        if pairs:
            scores = pseudo_likelihood.pseudo_log_likelihoods(
                model, encoded, config, accelerator, f"{model.name} on BLiMP"
            )
            figures["blimp"] = {
                "score": config.score,
                "unknown_share": unknown_share(model.tokenizer, minimal_pairs.sentences_of(pairs)),
                **minimal_pairs.blimp_results(pairs, scores.numpy()),
            }
        results.append(figures)
        model.to("cpu")
    content = {
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "options": {**dataclasses.asdict(config), **({"max_seq_length": length} if read else {})},
        "text": read.name if read else None,
        "models": results,
    }
    devices.on_main(_write, content, runs_table.table_of_runs(models, results), config)
    devices.shut_down(accelerator)
    return content if accelerator.is_main_process else None


def _encode_pairs(model, pairs, config):
    """The sentences of all minimal pairs as the model reads them; a `UserError` for one that is too long for it."""
    sentences = minimal_pairs.sentences_of(pairs)
    encoded = pseudo_likelihood.encode(model, sentences, config.score)
    unfit = np.flatnonzero((encoded.lengths() > model.most_positions) | (encoded.scored_tokens() == 0))
    if len(unfit):
        raise messages.UserError(
            f"{model.name} has {model.most_positions} positions, and {encoded.lengths()[unfit[0]]} tokens, or none "
            f"beside special ones and [UNK], in the sentence {sentences[unfit[0]]!r:.60}; take the sentence out"
        )
    return encoded


def _write(content: dict, of_runs: list[dict], config: EvaluateConfig) -> None:
    """Show the tables; then write the file and the models' cards that the options ask for."""
    messages.report.info(evaluation_table(content))
    if any(row["seeds"] > 1 for row in of_runs):
        messages.report.info(f"\n{runs_table.as_markdown(of_runs)}")
    if config.output is not None:
        forms = {".md": runs_table.as_markdown, ".csv": runs_table.as_csv}
        with messages.writing(config.output, ", or name another file"):
            if form := forms.get(Path(config.output).suffix.lower()):
                Path(config.output).write_text(form(of_runs), encoding="utf-8", newline="")
            else:
                folders.write_json(Path(config.output), content)
        logger.info(f"wrote {config.output}")
    for figures in content["models"] if config.update_card else ():
        folder = Path(figures["model"])
        evaluations.update_folder(folder, content["text"], figures.get("text"), figures.get("blimp"))
        logger.info(f"{folder}: wrote the figures into metrics.json and README.md")


# ---------------------------------------------------------------------------------------------------------------------
# The table


LABEL_WIDTH = 38

# The rows of a text's table: the label, the figure's name in `evaluate_text` or `pseudo_perplexity`, and its format.
TEXT_ROWS = (
    ("characters in [UNK]", "unknown_share", ".1%"),
    ("MLM loss (nats a token)", "mlm_loss", ".3f"),
    ("MLM perplexity", "perplexity", ",.1f"),
    ("MLM accuracy", "mlm_accuracy", ".1%"),
    ("MLM top-5 accuracy", "mlm_top_5_accuracy", ".1%"),
    ("masked tokens", "masked_tokens", ",d"),
    *((f"{task.short} loss", f"{task.key}_loss", ".3f") for task in PAIR_TASKS.values()),
    *((f"{task.short} accuracy", f"{task.key}_accuracy", ".1%") for task in PAIR_TASKS.values()),
    *((f"{task.short}, one segment alone", f"{task.key}_one_segment_accuracy", ".1%") for task in PAIR_TASKS.values()),
    ("pairs", "pairs", ",d"),
    ("single segments", "sequences", ",d"),
    ("pseudo-perplexity of a word", "pseudo_perplexity", ",.1f"),
    ("  its sentences", "pppl_sentences", ",d"),
    ("  their words without [UNK]", "pppl_words", ",d"),
    ("  the tokens of these words", "pppl_tokens", ",d"),
)


def evaluation_table(content: dict) -> str:
    """
    The figures as text for the terminal, with a dash where a model has no such figure.

    Args:
        content: what `evaluate` returned.
    """
    models, notes = content["models"], []
    names = [model["model"].rstrip("/") for model in models]
    last_parts = [name.rsplit("/", 1)[-1] for name in names]
    rows = [("", last_parts if len({*last_parts}) == len(names) else names)]
    rows.append(("parameters", [f"{model['parameters']:,}" for model in models]))
    if content["text"] is not None:
        texts = [model["text"] for model in models]
        rows += [("", []), (f"Text: {content['text']}", [])]
        for label, key, form in TEXT_ROWS:
            if any(key in text for text in texts):
                rows.append((f"  {label}", [format(text[key], form) if key in text else "-" for text in texts]))
        if len({text["pair_task"] for text in texts}) > 1:
            notes.append(
                "The models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
                "--objective none all MLM figures are on single segments."
            )
        if len({text["tokens"] for text in texts}) > 1:
            notes.append(
                "The models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses "
                "and perplexities of tokens."
            )
    if "blimp" in models[0]:
        results = [model["blimp"] for model in models]
        pairs, count = (results[0][name] for name in ("pairs", "paradigm_count"))
        rows += [("", []), (f"BLiMP, score {results[0]['score']}: {pairs:,} pairs in {count} of 67 paradigms", [])]
        rows.append(("  characters in [UNK]", [f"{blimp['unknown_share']:.1%}" for blimp in results]))
        phenomena = {name: [blimp["phenomena"][name] for blimp in results] for name in results[0]["phenomena"]}
        for name, figures in {"all paradigms": results, **phenomena}.items():
            cells = [f"{100 * each['accuracy']:.1f} ± {100 * each['standard_error']:.1f} %" for each in figures]
            rows.append((f"  {name.replace('_', ' ')} ({figures[0]['paradigm_count']})", cells))
    width = max(14, *(len(cell) for _, cells in rows for cell in cells))
    lines = [f"{label:<{LABEL_WIDTH}}" + "".join(f"  {cell:>{width}}" for cell in cells) for label, cells in rows]
    return "\n".join([line.rstrip() for line in lines] + [""] * bool(notes) + notes)
