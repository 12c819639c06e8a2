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
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.records import read_record
from d2l_bert.tokenization import account, sources
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
        The content of the file `config.output`: `versions`, `options`, `text` (the text's name) and `models`. Each
        model has its `model` (the name given), `class`, `parameters`, and as far as they were asked for `text`
        (`text.evaluate_text`) and `blimp` (`minimal_pairs.blimp_results`, with `score`), each with `unknown_share`,
        the share of its characters in `[UNK]` (of a text, in a sample of `SAMPLED_CHARACTERS`).
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
            messages.refuse_first(
                {
                    "line_scores is for one model; name one": len(models) > 1,
                    "line_scores -: one process alone can read the standard input; give a file": (
                        config.line_scores == sources.STDIN and accelerator.num_processes > 1
                    ),
                }
            )
            models[0].to(accelerator.device)
            pseudo_likelihood.print_line_scores(models[0], config, accelerator)
            devices.shut_down(accelerator)
            return None
    pairs = devices.on_main(minimal_pairs.read_blimp, config.blimp) if config.blimp else []
    with devices.together():
        encoded_pairs = [_encode_pairs(model, pairs, config) for model in models]
        if config.has_text():
            length = min(text.run_of(model, config).max_seq_length for model in models)
            of_held_out = next((model for model in models if model.record), models[0])
            messages.refuse_first(
                {
                    f"{names[0]}: no run_config.json says which documents its run held out; leave held_out out, or "
                    f"name a model of pretrain first": config.held_out and not of_held_out.record
                }
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
                figures["text"] = text.evaluate_text(model, corpus_name, part, config, length, accelerator)
            figures["text"] |= text.pseudo_perplexity(model, sentences, config, accelerator) if sentences else {}
        if pairs:
            scores = pseudo_likelihood.pseudo_log_likelihoods(
                model, encoded, config, accelerator, f"{model.name} on BLiMP"
            )
            figures["blimp"] = {
                "name": folders.base_name(config.blimp),
                "score": config.score,
                "unknown_share": account.unknown_share(model.tokenizer, minimal_pairs.sentences_of(pairs)),
                **minimal_pairs.blimp_results(pairs, scores.numpy()),
            }
        results.append(figures)
        model.to("cpu")
    content = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("d2l-bert", "torch", "transformers", "tokenizers")
        },
        "options": {**dataclasses.asdict(config), **({"max_seq_length": length} if config.has_text() else {})},
        "text": corpus_name if config.has_text() else None,
        "models": results,
    }
    devices.on_main(_write, content, table_of_runs(models, results), config)
    devices.shut_down(accelerator)
    return content if accelerator.is_main_process else None


def _encode_pairs(model, pairs, config):
    """The sentences of all minimal pairs as the model reads them; a `UserError` for one that is too long for it."""
    sentences = minimal_pairs.sentences_of(pairs)
    encoded = pseudo_likelihood.encode(model, sentences, config.score)
    unfit = np.flatnonzero((encoded.lengths > model.most_positions) | (encoded.scored_tokens == 0))
    messages.refuse_first(
        {
            f"{model.name} has {model.most_positions} positions, and {encoded.lengths[number]} tokens, or none beside "
            f"special ones and [UNK], in the sentence {sentences[number]!r:.60}; take the sentence out": True
            for number in unfit
        }
    )
    return encoded


def _write(content: dict, of_runs: list[dict], config: EvaluateConfig) -> None:
    """Show the tables; then write the file and the models' cards that the options ask for."""
    messages.report.info(evaluation_table(content))
    if any(row["seeds"] > 1 for row in of_runs):
        messages.report.info(f"\n{as_markdown(of_runs)}")
    if config.output is not None:
        output = Path(config.output)
        with messages.writing(output, ", or name another file"):
            if output.suffix.lower() == ".json":
                folders.write_json(output, content)
            elif output.suffix.lower() == ".md":
                output.write_text(as_markdown(of_runs), encoding="utf-8")
            else:
                columns = dict.fromkeys(name for row in of_runs for name in row)
                csv.write_csv(pa.table({name: [row.get(name) for row in of_runs] for name in columns}), output)
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
            (
                f"BLiMP, score {blimps[0]['score']}: {blimps[0]['pairs']:,} pairs in {blimps[0]['paradigm_count']} of "
                f"67 paradigms",
                [],
            ),
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
    notes = {
        "\nThe models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
        "--objective none all MLM figures are on single segments.": len({text["pair_task"] for text in texts}) > 1,
        "\nThe models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses and "
        "perplexities of tokens.": len({text["tokens"] for text in texts}) > 1,
    }
    lines += [note for note, holds in notes.items() if holds]
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# The table of runs

# The figures by their columns: the part of a model's results, `run` for its own metrics.json; the name there; the
# factor to the unit of the column; and the format in Markdown.
RUN_COLUMNS = {
    "words seen, millions": ("run", "train_words_seen", 1e-6, ".1f"),
    "minutes": ("run", "train_seconds", 1 / 60, ".1f"),
    "MLM loss": ("text", "mlm_loss", 1, ".3f"),
    "MLM accuracy": ("text", "mlm_accuracy", 1, ".1%"),
    **{f"{task.short} accuracy": ("text", f"{task.key}_accuracy", 1, ".1%") for task in PAIR_TASKS.values()},
    "pseudo-perplexity of a word": ("text", "pseudo_perplexity", 1, ",.1f"),
    "BLiMP": ("blimp", "accuracy", 1, ".1%"),
}

DEVIATION = "{}, standard deviation"


def table_of_runs(models: Sequence[masked_models.MaskedModel], results: list[dict]) -> list[dict]:
    """
    The rows of a table of pretraining runs: those that differ in their seed alone are one row.

    Args:
        models: those in a folder that a run of `pretrain` has left are in the table.
        results: of each model what `evaluate` has measured.

    Returns:
        For each group of runs `runs`, what their names have in common; `seeds`, how many they are; and of each figure
        the mean, and the standard deviation (n - 1) if there are several seeds.
    """
    groups, rows = {}, []
    for model, measured in zip(models, results, strict=True):
        metrics = read_record(Path(model.name, card.METRICS_FILE))
        if "run" in model.record and metrics:
            same = {name: model.record["run"].get(name) for name in PretrainConfig().identity() if name != "seed"}
            same |= model.record["architecture"]
            groups.setdefault(json.dumps(same), []).append({**measured, "run": metrics})
    for runs in groups.values():
        names = [folders.base_name(run["model"]) for run in runs]
        row = {"runs": re.sub(r"[-_. ]*\d*$", "", os.path.commonprefix(names)) or names[0], "seeds": len(runs)}
        for label, (part, name, factor, _) in RUN_COLUMNS.items():
            values = [factor * run[part][name] for run in runs if name in run.get(part, {})]
            row |= {label: statistics.fmean(values)} if values else {}
            row |= {DEVIATION.format(label): statistics.stdev(values)} if len(values) > 1 else {}
        rows.append(row)
    return rows


def as_markdown(rows: list[dict]) -> str:
    """The table as Markdown, with deviations in brackets."""
    columns = {label: form for label, (*_, form) in RUN_COLUMNS.items() if any(label in row for row in rows)}

    def cell(row, label, form):
        deviation = row.get(DEVIATION.format(label))
        of_seeds = "" if deviation is None else f" ({deviation:{form}})"
        return f"{row[label]:{form}}{of_seeds}" if label in row else ""

    lines = [["runs", "seeds", *columns], ["---"] * (len(columns) + 2)]
    lines += [
        [markdown.cell(row["runs"]), str(row["seeds"]), *(cell(row, *column) for column in columns.items())]
        for row in rows
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
