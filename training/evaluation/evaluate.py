"""`d2l-bert evaluate`: figures of masked language models on a text and on minimal pairs, side by side."""

import dataclasses
import importlib.metadata
import json
import logging
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from d2l_bert import folders, messages
from d2l_bert.model_cards import card, evaluations, markdown
from d2l_bert.model_cards.blimp import BLIMP, PHENOMENON_OF
from d2l_bert.modeling.records import Metrics
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.records import read_record
from d2l_bert.tokenization import coverage, files, wordpiece
from d2l_bert.training import devices
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation import masked_models, minimal_pairs, pseudo_likelihood, text
from d2l_bert.training.evaluation.config import EvaluateConfig


logger = logging.getLogger(__name__)


@devices.restore_host_settings()
def evaluate(names: Sequence[str], config: EvaluateConfig) -> dict | None:
    """
    Evaluate models on a text, on minimal pairs, or on both, in float32.

    Args:
        names: folders or Hub ids of masked language models.
        config: what to evaluate them on, and where to write the figures.

    Returns:
        The content of the file `config.output`: `versions`, `options`, with those of the rows as they were for all
        models, `text` (the text's name), `models` and `notes` (`notes_on`). Each model has its `model` (the name
        given), `class`, `parameters`, and as far as they were asked for `text` (`text.evaluate_text`) and `blimp`
        (`minimal_pairs.blimp_results`, with `score`, with `name`, that of the folder, and with `title`, as of
        `minimal_pairs.name_of_pairs`), each with `unknown_share`, the share of its characters in `[UNK]` (of a text,
        in a sample of `SAMPLED_CHARACTERS`).
        None in all processes but the main one.

    Raises:
        UserError: something that the user can fix, in one line.
        SystemExit: in a run of several processes, the main process has raised an error, and shows it.
    """
    devices.start_processes()
    with devices.together():
        config.check()
        if config.output is not None:
            folders.check_new_file(Path(config.output))
        for name in names if config.update_card else ():
            evaluations.check_updatable(name)
        accelerator = devices.make_accelerator("no")
        models = [masked_models.MaskedModel(name) for name in names]
        if config.line_scores:
            if len(models) > 1:
                raise messages.UserError("line_scores is for one model; name one")
            if config.line_scores == files.STDIN and accelerator.num_processes > 1:
                raise messages.UserError("line_scores -: one process alone can read the standard input; give a file")
            models[0].to(accelerator.device)
            pseudo_likelihood.print_line_scores(models[0], config, accelerator)
            devices.shut_down(accelerator)
            return None
    pairs = devices.on_main(minimal_pairs.read_blimp, config.blimp) if config.blimp else []
    pairs_name = minimal_pairs.name_of_pairs(pairs, config.blimp) if pairs else None
    options = dataclasses.asdict(config)
    with devices.together():
        encoded_pairs = [_encode_pairs(model, pairs, config) for model in models]
        if config.has_text():
            shape = text.rows_of_all(models, config)
            length = shape.max_seq_length
            options |= {name: getattr(shape, name) for name in text.ROW_OPTIONS}
            of_held_out = next((model for model in models if model.record), models[0])
            if config.held_out and not of_held_out.record:
                raise messages.UserError(
                    f"{names[0]}: no run_config.json says which documents its run held out; leave held_out out, or "
                    f"name a model of pretrain first"
                )
            corpus_name, part = devices.main_first(text.read_text, config, of_held_out)
            sentences = text.sample_sentences(part, config.pppl_sentences, models, length)
            if config.pppl_sentences and not sentences:
                logger.warning(
                    f"no pseudo-perplexity: each sentence of {corpus_name} has no word without [UNK], or more tokens "
                    f"than max_seq_length ({length}); give shorter sentences, or a larger max_seq_length"
                )
    results = []
    for model, encoded in zip(models, encoded_pairs, strict=True):
        model.to(accelerator.device)
        figures = {
            "model": model.name,
            "class": type(model.model).__name__,
            "parameters": model.parameter_count,
        }
        if config.has_text():
            with devices.together():
                figures["text"] = text.evaluate_text(model, corpus_name, part, config, shape, accelerator)
            figures["text"] |= text.pseudo_perplexity(model, sentences, config, accelerator) if sentences else {}
        if pairs:
            scores = pseudo_likelihood.pseudo_log_likelihoods(
                model, encoded, config, accelerator, f"{model.name} on {pairs_name}"
            )
            figures["blimp"] = {
                "name": folders.base_name(config.blimp),
                "title": pairs_name,
                "score": config.score,
                "unknown_share": coverage.measure_unknown_share(model.tokenizer, minimal_pairs.sentences_of(pairs)),
                **minimal_pairs.blimp_results(pairs, scores.numpy()),
            }
        results.append(figures)
        model.to("cpu")
    content = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("d2l-bert", "torch", "transformers", "tokenizers")
        },
        "options": options,
        "text": corpus_name if config.has_text() else None,
        "models": results,
        "notes": notes_on(models, results),
    }
    devices.on_main(_write, content, models, config)
    devices.shut_down(accelerator)
    return content if accelerator.is_main_process else None


def _encode_pairs(model, pairs, config):
    """The sentences of all minimal pairs as the model reads them; a `UserError` for one that is too long for it."""
    sentences = minimal_pairs.sentences_of(pairs)
    encoded = pseudo_likelihood.encode(model, sentences, config.score)
    unfit = np.flatnonzero((encoded.lengths > model.most_positions) | (encoded.scored_tokens == 0))
    if len(unfit):
        number = unfit[0]
        raise messages.UserError(
            f"{model.name} has {model.most_positions} positions, and {encoded.lengths[number]} tokens, or none beside "
            f"special ones and [UNK], in the sentence {sentences[number]!r:.60}; take the sentence out"
        )
    return encoded


def _write(content: dict, models: Sequence[masked_models.MaskedModel], config: EvaluateConfig) -> None:
    """Show the tables; then write the file and the models' cards that the options ask for."""
    messages.report.info(evaluation_table(content))
    of_runs = table_of_runs(models, content["models"])
    formats = {label: form for label, (*_, form) in run_columns(content["models"][0]).items()}
    in_markdown = as_markdown(of_runs, formats, content["notes"])
    if any(row["seeds"] > 1 for row in of_runs):
        messages.report.info(f"\n{in_markdown}")
    if config.output is not None:
        output = Path(config.output)
        with folders.new_file(output) as partial:
            if output.suffix.lower() == ".json":
                folders.write_json(partial, content)
            elif output.suffix.lower() == ".md":
                partial.write_text(in_markdown, encoding="utf-8")
            else:
                if content["notes"]:
                    of_runs = [{**row, "notes": " ".join(content["notes"])} for row in of_runs]
                columns = dict.fromkeys(name for row in of_runs for name in row)
                csv.write_csv(pa.table({name: [row.get(name) for row in of_runs] for name in columns}), partial)
    for figures in content["models"] if config.update_card else ():
        evaluations.update_folder(Path(figures["model"]), content["text"], figures.get("text"), figures.get("blimp"))


# ---------------------------------------------------------------------------------------------------------------------
# The table of models


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
    models = content["models"]
    texts, blimps = ([model[part] for model in models if part in model] for part in ("text", "blimp"))
    rows = [
        ("", [folders.base_name(model["model"]) for model in models]),  # in the order of the command
        ("parameters", [f"{model['parameters']:,}" for model in models]),
    ]
    if texts:
        rows += [
            ("", []),
            (f"Text: {content['text']}", []),
            *(
                (f"  {label}", [format(text[key], form) if key in text else "-" for text in texts])
                for label, key, form in TEXT_ROWS
                if any(key in text for text in texts)
            ),
        ]
    if blimps:
        phenomena = {name: [blimp["phenomena"][name] for blimp in blimps] for name in blimps[0]["phenomena"]}
        rows += [
            ("", []),
            (_title_of_pairs(blimps[0]), []),
            ("  characters in [UNK]", [f"{blimp['unknown_share']:.1%}" for blimp in blimps]),
            *(
                (
                    f"  {name.replace('_', ' ')} ({figures[0]['paradigm_count']})",
                    [f"{100 * each['accuracy']:.1f} ± {100 * each['standard_error']:.1f} %" for each in figures],
                )
                for name, figures in {"all paradigms": blimps, **phenomena}.items()
            ),
        ]
    width = max(14, *(len(cell) for _, cells in rows for cell in cells))
    lines = [f"{label:<38}" + "".join(f"  {cell:>{width}}" for cell in cells) for label, cells in rows]
    lines += [f"\n{note}" for note in content["notes"]]
    return "\n".join(line.rstrip() for line in lines)


def _title_of_pairs(blimp: dict) -> str:
    """The line above the accuracies on minimal pairs."""
    counted = f"{messages.counted(blimp['pairs'], 'pair')} in {blimp['paradigm_count']}"
    of_all = f" of {len(PHENOMENON_OF)}" if blimp["title"] == BLIMP else ""
    paradigms = "paradigm" if blimp["paradigm_count"] == 1 and not of_all else "paradigms"
    return f"{blimp['title']}, score {blimp['score']}: {counted}{of_all} {paradigms}"


def notes_on(models: Sequence[masked_models.MaskedModel], results: Sequence[dict]) -> list[str]:
    """
    In what the figures of several models on a text are of different things, and so not to be compared.

    Args:
        results: of each model what `evaluate` has measured.
    """
    texts = [figures["text"] for figures in results if "text" in figures]
    tokenizers = {wordpiece.tokenizer_fingerprint(model.tokenizer) for model in models}
    notes = []
    if len({text["pair_task"] for text in texts}) > 1:
        notes.append(
            "The models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
            "--objective none all MLM figures are on single segments."
        )
    if texts and len(tokenizers) > 1:
        notes.append(
            "The models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses and "
            "perplexities of tokens."
        )
    if len({text.get("pppl_words") for text in texts}) > 1:
        notes.append(
            "The pseudo-perplexities are not of the same words: each leaves out what its tokenizer does not know."
        )
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# The table of runs

# The figures by their columns: the part of a model's results, `run` for its own metrics.json; the name there; the
# factor to the unit of the column; and the format in Markdown. The last column has the name of the pairs.
RUN_COLUMNS = {
    "words seen, millions": ("run", "train_words_seen", 1e-6, ".1f"),
    "minutes": ("run", "train_seconds", 1 / 60, ".1f"),
    "MLM loss": ("text", "mlm_loss", 1, ".3f"),
    "MLM accuracy": ("text", "mlm_accuracy", 1, ".1%"),
    **{f"{task.short} accuracy": ("text", f"{task.key}_accuracy", 1, ".1%") for task in PAIR_TASKS.values()},
    "pseudo-perplexity of a word": ("text", "pseudo_perplexity", 1, ",.1f"),
}
PAIRS_COLUMN = ("blimp", "accuracy", 1, ".1%")

DEVIATION = "{}, standard deviation"


@dataclasses.dataclass
class MeasuredRun:
    """A model in the table of runs: its name there, and its figures by the parts of `RUN_COLUMNS`."""

    name: str
    figures: dict


def table_of_runs(models: Sequence[masked_models.MaskedModel], results: list[dict]) -> list[dict]:
    """
    The rows of a table of models: finished pretraining runs that differ in their seed alone are one row.

    Args:
        results: of each model what `evaluate` has measured.

    Returns:
        For each row `runs`, the model's name, or what the names of several runs have in common; `seeds`, how many runs
        they are; and of each figure the mean, and the standard deviation (n - 1) if there are several seeds.
    """
    groups: dict[object, dict[object, MeasuredRun]] = {}
    for number, (model, name, measured) in enumerate(zip(models, names_apart(models), results, strict=True)):
        metrics = read_record(Path(model.name, card.METRICS_FILE), Metrics, allow_nan=True)
        seed = model.record.get("run", {}).get("seed")
        is_finished_run = "run" in model.record and bool(metrics)
        group = identity_but_seed(model) if is_finished_run else number
        if seed in groups.get(group, {}):
            group = number  # the same run again is no further seed
        groups.setdefault(group, {})[seed] = MeasuredRun(name, {**measured, "run": metrics})
    return [_row_of(list(runs.values())) for runs in groups.values()]


def names_apart(models: Sequence[masked_models.MaskedModel]) -> list[str]:
    """The last parts of the models' names; the whole names where two have the same last part."""
    short = [folders.base_name(model.name) for model in models]
    return short if len(set(short)) == len(short) else [model.name for model in models]


def identity_but_seed(model: masked_models.MaskedModel) -> str:
    """
    What decides what a run of `pretrain` has computed, its seed apart: equal for runs that differ in their seed alone.

    These are the options that decide, the architecture, the fingerprints of texts, of the model to start from and of
    the tokenizer. Names of files and folders do not count.
    """
    record = model.record
    options = {name: record["run"].get(name) for name in PretrainConfig().identity() if name != "seed"}
    data = record.get("data", {})
    of_text = {name: data.get(name) for name in ("corpus_fingerprint", "text_fingerprint", "held_out_fingerprint")}
    read = [entry["fingerprint"] for entry in record.get("fingerprints", [])]
    tokenizer = wordpiece.tokenizer_fingerprint(model.tokenizer)
    return json.dumps([options, record.get("architecture"), of_text, read, tokenizer], sort_keys=True)


def _row_of(runs: list[MeasuredRun]) -> dict:
    """The row of runs that differ in their seed alone, or of one model."""
    names = [run.name for run in runs]
    in_common = re.sub(r"[-_. ]*\d*$", "", os.path.commonprefix(names))
    name = in_common if len(names) > 1 and in_common else ", ".join(names)
    row = {"runs": name, "seeds": len(runs)}
    for label, (part, figure, factor, _) in run_columns(runs[0].figures).items():
        values = [factor * run.figures[part][figure] for run in runs if figure in run.figures.get(part, {})]
        if values:
            row[label] = statistics.fmean(values)
        if len(values) > 1:
            row[DEVIATION.format(label)] = statistics.stdev(values)
    return row


def run_columns(figures: dict) -> dict[str, tuple]:
    """`RUN_COLUMNS`, and the column of the minimal pairs where there are such figures."""
    title = figures.get("blimp", {}).get("title")
    return RUN_COLUMNS if title is None else {**RUN_COLUMNS, title: PAIRS_COLUMN}


def as_markdown(rows: list[dict], formats: dict[str, str], notes: Sequence[str]) -> str:
    """
    The table as Markdown, with deviations in brackets, and the notes below it.

    Args:
        rows: of `table_of_runs`.
        formats: by the labels of the columns, the formats of their numbers.
        notes: of `notes_on`.
    """
    shown = {label: form for label, form in formats.items() if any(label in row for row in rows)}
    lines = [["runs", "seeds", *map(markdown.cell, shown)], ["---"] * (len(shown) + 2)]
    for row in rows:
        cells = [markdown.cell(row["runs"]), str(row["seeds"])]
        for label, form in shown.items():
            cells.append(_markdown_cell(row, label, form))
        lines.append(cells)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return table + "".join(f"\n{note}\n" for note in notes)


def _markdown_cell(row, label, form):
    """A mean with its deviation in brackets, if it has one; "" where the row has no such figure."""
    if label not in row:
        return ""
    deviation = row.get(DEVIATION.format(label))
    return f"{row[label]:{form}}" if deviation is None else f"{row[label]:{form}} ({deviation:{form}})"
