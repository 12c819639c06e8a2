"""`d2l-bert evaluate`: figures of masked language models on a text and on minimal pairs, side by side."""

import importlib.metadata
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers.utils import logging as transformers_logging

from d2l_bert.errors import UserError
from d2l_bert.folders import write_json
from d2l_bert.model_cards.evaluations import check_updatable, update_folder
from d2l_bert.progress import report
from d2l_bert.training import distributed
from d2l_bert.training.distributed import on_main, restore_host_settings
from d2l_bert.training.evaluation.blimp import Paradigm, blimp_results, read_blimp, sentences_of
from d2l_bert.training.evaluation.config import DEFAULT_LENGTH, EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel, check_lengths, load_masked_model
from d2l_bert.training.evaluation.pseudo_likelihood import encode, scores_of_all
from d2l_bert.training.evaluation.table import evaluation_table, plot_phenomena, short_names
from d2l_bert.training.evaluation.text import (
    check_model_for_text,
    evaluate_text,
    pseudo_perplexity,
    read_text,
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
        (`text.evaluate_text`, with pseudo-perplexity) and `blimp` (`blimp.blimp_results`, with `score`).
        None in all processes but the main one.

    Raises:
        UserError: something that the user can mend, in one line.
        SystemExit: in a run of several processes, the main process has raised an error, and shows it.
    """
    transformers_logging.disable_progress_bar()
    with distributed.report_errors_once():
        config.check()
        places = [Path(name).resolve() if Path(name).exists() else name for name in names]
        for name, place in zip(names, places, strict=True):
            if places.count(place) > 1:
                raise UserError(f"{name}: given {places.count(place)} times; give each model once")
            if config.update_card:
                check_updatable(name)
        accelerator = distributed.make_accelerator("no")
        models = [load_masked_model(name) for name in names]
        if config.has_text():
            for model in models:
                check_model_for_text(model, config)
            length = check_lengths(models, config.max_seq_length, DEFAULT_LENGTH)
    paradigms = on_main(accelerator, read_blimp, config.blimp) if config.blimp else []
    with distributed.report_errors_once():
        encoded_pairs = [_encode_pairs(model, paradigms, config) for model in models] if paradigms else []
    text = sentences = None
    if config.has_text():
        # The main process reads the text first. The other processes then find it in the cache.
        text = on_main(accelerator, read_text, config, share_result=False) or read_text(config)
        sentences = text.sentences(config.pppl_sentences, models, length) if config.pppl_sentences else []
        if config.pppl_sentences and not sentences and accelerator.is_main_process:
            logger.warning(
                f"no pseudo-perplexity: each sentence of {text.name} has no token, or more tokens than "
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
            with distributed.report_errors_once():
                figures["text"] = evaluate_text(model, text, config, length, accelerator)
            if sentences:
                figures["text"] |= pseudo_perplexity(model, sentences, config, accelerator)
        if paradigms:
            scores = scores_of_all(model, encoded_pairs[number], config, accelerator, f"{model.name} on BLiMP")
            figures["blimp"] = {"score": config.score, **blimp_results(paradigms, scores.numpy())}
        results.append(figures)
        model.to("cpu")
        if accelerator.is_main_process:
            logger.info(f"{model.name}: evaluated in {time.monotonic() - start:.0f} s")
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers")
    content = {
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "options": {**asdict(config), **({"max_seq_length": length} if text else {})},
        "text": text.name if text else None,
        "models": results,
    }
    on_main(accelerator, _write, content, config)
    distributed.shut_down(accelerator)
    return content if accelerator.is_main_process else None


def _encode_pairs(model: MaskedModel, paradigms: Sequence[Paradigm], config: EvaluateConfig):
    """The sentences of all minimal pairs as the model reads them; a `UserError` for one that is too long for it."""
    sentences = sentences_of(paradigms)
    encoded = encode(model, sentences, config.score)
    lengths = encoded.lengths()
    if lengths.max() > model.most_positions:
        sentence = sentences[int(lengths.argmax())]
        raise UserError(
            f"{model.name} has {model.most_positions} positions, and the sentence {sentence[:40]!r}... has "
            f"{lengths.max()} tokens; take the sentence out"
        )
    if not encoded.scored_tokens().all():
        sentence = sentences[int(encoded.scored_tokens().argmin())]
        raise UserError(
            f"{model.name}: its tokenizer finds no token in the sentence {sentence!r}; take the sentence out"
        )
    return encoded


def _write(content, config: EvaluateConfig) -> None:
    """Show the table; then write the JSON file, the picture and the models' cards that the options ask for."""
    report.info(evaluation_table(content))
    try:
        if config.output is not None:
            write_json(Path(config.output), content)
            logger.info(f"wrote {config.output}")
        if (picture := config.picture()) is not None:
            names = short_names([figures["model"] for figures in content["models"]])
            results = [figures["blimp"] for figures in content["models"]]
            plot_phenomena(list(zip(names, results, strict=True)), picture)
            logger.info(f"wrote {picture}")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); name another file") from None
    if config.update_card:
        for figures in content["models"]:
            update_folder(Path(figures["model"]), content["text"], figures.get("text"), figures.get("blimp"))
            logger.info(f"{figures['model']}: wrote the figures into metrics.json and README.md")
