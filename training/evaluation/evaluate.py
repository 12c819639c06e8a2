"""`d2l-bert evaluate`: figures of masked language models on a text and on minimal pairs, or the scores of lines."""

import dataclasses
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from accelerate import Accelerator
from pyarrow import csv

from d2l_bert import folders, messages
from d2l_bert.model_cards import evaluations
from d2l_bert.tokenization import coverage, files, wordpiece
from d2l_bert.tokenization.text_store import TextPart
from d2l_bert.training import devices, processes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation import comparison, minimal_pairs, pseudo_likelihood, text
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.minimal_pairs import MinimalPair


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluateResult:
    """
    What was measured of models.

    Args:
        models: of each its `model` (the name given), `class`, `parameters`, and as far as they were asked for `text`,
            the figures of `text.evaluate_text`, and `blimp`, those of `minimal_pairs.blimp_results` with `score`, the
            folder's `name`, and `title` (`minimal_pairs.name_of_pairs`). Each of both has `unknown_share`, the share
            of its characters in `[UNK]`; of a text, in a sample of `SAMPLED_CHARACTERS`.
        notes: a sentence for each reason why the figures cannot be compared, as of `notes_on`.
        lines: the scores of the lines of `line_scores`; [] if they went to `on_line`.
        output: the file with the figures; None if none was asked for.
    """

    models: list[dict]
    notes: list[str]
    lines: list[pseudo_likelihood.LineScore]
    output: Path | None


@processes.restore_host_settings()
def evaluate(
    names: Sequence[str],
    config: EvaluateConfig,
    on_line: Callable[[pseudo_likelihood.LineScore], object] | None = None,
    titles: Sequence[str] | None = None,
) -> EvaluateResult:
    """
    Evaluate models on a text, on minimal pairs, or on both, in float32; or score lines by one model.

    Args:
        names: folders or Hub ids of masked language models.
        config: what to evaluate them on, and where to write the figures.
        on_line: takes each line as soon as it is scored, in the main process, where all would be too many to keep.
        titles: what the models are called in results and messages; None for their names.

    Raises:
        UserError: something that the user can fix, in one line.
        SystemExit: another process has raised an error that is no `UserError`, and shows it.
    """
    processes.start_processes()
    with processes.together():
        config.check()
        if config.output is not None:
            folders.check_new_file(Path(config.output))
        if config.update_card:
            for name in names:
                evaluations.check_updatable(name)
        accelerator = devices.make_accelerator("no")
        models = list(map(MaskedModel, names, titles or names))
    lines = []
    content = {"models": [], "notes": []}
    if config.line_scores:
        with processes.together():
            for line in scored_lines(models, config, accelerator):
                if on_line is None:
                    lines.append(line)
                elif accelerator.is_main_process:
                    on_line(line)
    else:
        content = compare(models, config, accelerator)
        processes.on_main(_write, content, models, config)
    processes.shut_down(accelerator)
    output = None if config.output is None else Path(config.output)
    return EvaluateResult(models=content["models"], notes=content["notes"], lines=lines, output=output)


def scored_lines(
    models: Sequence[MaskedModel], config: EvaluateConfig, accelerator: Accelerator
) -> Iterator[pseudo_likelihood.LineScore]:
    """
    How likely a model finds the lines of a file, as of `pseudo_likelihood.line_scores`.

    Raises:
        UserError: there are several models, several processes would read the standard input, or a line cannot be read.
    """
    if len(models) > 1:
        raise messages.UserError("line_scores is for one model; name one")
    if config.line_scores == files.STDIN and accelerator.num_processes > 1:
        raise messages.UserError("line_scores -: one process alone can read the standard input; give a file")
    model = models[0].to(accelerator.device)
    return pseudo_likelihood.line_scores(model, config, accelerator)


# ---------------------------------------------------------------------------------------------------------------------
# Models side by side


@dataclasses.dataclass(frozen=True)
class Pairs:
    """
    The minimal pairs to measure models on.

    Args:
        pairs: the pairs.
        title: what they are called in tables.
        encoded: their sentences as each model reads them.
    """

    pairs: list[MinimalPair]
    title: str
    encoded: list[pseudo_likelihood.EncodedSentences]


@dataclasses.dataclass(frozen=True)
class Text:
    """
    The text to measure models on.

    Args:
        name: of its sources.
        part: the documents.
        options: those of the rows, for all models; only the objective may be another for each model.
        sentences: a sample for pseudo-perplexity.
    """

    name: str
    part: TextPart
    options: PretrainConfig
    sentences: list[str]


def compare(models: Sequence[MaskedModel], config: EvaluateConfig, accelerator: Accelerator) -> dict:
    """
    Measure models on a text and on minimal pairs, as far as the options give them.

    Returns:
        The content of a JSON file of `config.output`, in every process: `versions`; `options`, with those of the rows
        as they were for all models; `text`, the text's name; `models` and `notes` as in `EvaluateResult`.
    """
    pairs = prepare_pairs(models, config) if config.blimp else None
    given_text = prepare_text(models, config) if config.has_text() else None
    results = []
    for number, model in enumerate(models):
        model.to(accelerator.device)
        figures = {"model": model.name, "class": type(model.model).__name__, "parameters": model.parameter_count}
        if given_text:
            figures["text"] = on_text(model, given_text, config, accelerator)
        if pairs:
            figures["blimp"] = on_pairs(model, pairs, pairs.encoded[number], config, accelerator)
        results.append(figures)
        model.to("cpu")
    options = dataclasses.asdict(config)
    if given_text:
        options |= {name: getattr(given_text.options, name) for name in text.ROW_OPTIONS}
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers")
    return {
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "options": options,
        "text": given_text.name if given_text else None,
        "models": results,
        "notes": notes_on(models, results),
    }


def prepare_pairs(models: Sequence[MaskedModel], config: EvaluateConfig) -> Pairs:
    """
    Read the minimal pairs, and encode them for each model.

    Raises:
        UserError: they cannot be read, or a sentence is too long for a model.
    """
    pairs = processes.on_main(minimal_pairs.read_blimp, config.blimp)
    title = minimal_pairs.name_of_pairs(pairs, config.blimp)
    with processes.together():
        encoded = [_encode_pairs(model, pairs, config) for model in models]
    return Pairs(pairs, title, encoded)


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


def prepare_text(models: Sequence[MaskedModel], config: EvaluateConfig) -> Text:
    """
    Read the text, and decide the options of the rows for all models.

    Raises:
        UserError: the text cannot be read, or an option does not fit a model.
    """
    with processes.together():
        options = text.options_for_all(models, config)
        # With `held_out`, the run of the first model that has a record says which documents are read.
        with_record = next((model for model in models if model.record), models[0])
        if config.held_out and not with_record.record:
            raise messages.UserError(
                f"{models[0].name}: no run_config.json says which documents its run held out; leave held_out out, or "
                f"name a model of pretrain first"
            )
        name, part = processes.main_first(text.read_text, config, with_record)
        sentences = text.sample_sentences(part, config.pppl_sentences, models, options.max_seq_length)
        if config.pppl_sentences and not sentences:
            logger.warning(
                f"no pseudo-perplexity: each sentence of {name} has no word without [UNK], or more tokens "
                f"than max_seq_length ({options.max_seq_length}); give shorter sentences, or a larger max_seq_length"
            )
    return Text(name, part, options, sentences)


def on_text(model: MaskedModel, given_text: Text, config: EvaluateConfig, accelerator: Accelerator) -> dict:
    """The figures of a model on the text, pseudo-perplexity last."""
    with processes.together():
        figures = text.evaluate_text(model, given_text.name, given_text.part, config, given_text.options, accelerator)
    if given_text.sentences:
        figures |= text.pseudo_perplexity(model, given_text.sentences, config, accelerator)
    return figures


def on_pairs(
    model: MaskedModel,
    pairs: Pairs,
    encoded: pseudo_likelihood.EncodedSentences,
    config: EvaluateConfig,
    accelerator: Accelerator,
) -> dict:
    """The figures of a model on the minimal pairs."""
    scores = pseudo_likelihood.pseudo_log_likelihoods(
        model, encoded, config, accelerator, f"{model.name} on {pairs.title}"
    )
    sentences = minimal_pairs.sentences_of(pairs.pairs)
    return {
        "name": folders.base_name(config.blimp),
        "title": pairs.title,
        "score": config.score,
        "unknown_share": coverage.measure_unknown_share(model.tokenizer, sentences),
        **minimal_pairs.blimp_results(pairs.pairs, scores.numpy()),
    }


def notes_on(models: Sequence[MaskedModel], results: Sequence[dict]) -> list[str]:
    """
    A sentence for each reason why figures of several models on a text cannot be compared.

    Args:
        results: of each model what `compare` has measured.
    """
    texts = [figures["text"] for figures in results if "text" in figures]
    tokenizers = {wordpiece.tokenizer_fingerprint(model.tokenizer) for model in models}
    notes = []
    if len({figures["pair_task"] for figures in texts}) > 1:
        notes.append(
            "The models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
            "--objective none all MLM figures are on single segments."
        )
    if texts and len(tokenizers) > 1:
        notes.append(
            "The models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses and "
            "perplexities of tokens."
        )
    if len({figures.get("pppl_words") for figures in texts}) > 1:
        notes.append(
            "The pseudo-perplexities are not of the same words: each leaves out what its tokenizer does not know."
        )
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# Figures to the terminal, to a file and to cards


def _write(content: dict, models: Sequence[MaskedModel], config: EvaluateConfig) -> None:
    """Show the tables; then write the file and the models' cards that the options ask for."""
    messages.report.info(comparison.table_of_models(content))
    table = comparison.table_of_runs(models, content["models"])
    in_markdown = comparison.as_markdown(table, content["models"], content["notes"])
    if any(row["seeds"] > 1 for row in table):
        messages.report.info(f"\n{in_markdown}")
    if config.output is not None:
        with folders.new_file(Path(config.output)) as partial:
            kind = Path(config.output).suffix.lower()
            if kind == ".json":
                folders.write_json(partial, content)
            elif kind == ".md":
                partial.write_text(in_markdown, encoding="utf-8")
            else:
                _write_csv(partial, table, content["notes"])
    if config.update_card:
        for figures in content["models"]:
            folder = Path(figures["model"])
            evaluations.update_folder(folder, content["text"], figures.get("text"), figures.get("blimp"))


def _write_csv(path, table, notes) -> None:
    """Write the table of runs, with the notes in each row."""
    if notes:
        table = [{**row, "notes": " ".join(notes)} for row in table]
    names = dict.fromkeys(name for row in table for name in row)
    columns = {}
    for name in names:
        columns[name] = [row.get(name) for row in table]
    csv.write_csv(pa.table(columns), path)
