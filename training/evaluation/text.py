"""The text of `d2l-bert evaluate`: read once, tokenized for each model; MLM and pair figures; pseudo-perplexity."""

import dataclasses
import logging
import math
from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator

from d2l_bert.folders import cache_folder
from d2l_bert.messages import UserError, explained, progress_bar, refuse_first
from d2l_bert.options import BATCHES, TEXT
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.config import SourceConfig
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.prepare import SAMPLED_CHARACTERS, open_sources, read_sources
from d2l_bert.tokenization.text_store import TextPart, held_out_documents
from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Ranks
from d2l_bert.training.devices import main_first
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.pseudo_likelihood import encode, scores_of_all
from d2l_bert.training.held_out import HELD_OUT_SEED, MAX_LOSS, HeldOutPairs, held_out_counts, held_out_metrics


logger = logging.getLogger(__name__)

# What a model's run decides of its rows, unless an option of `EvaluateConfig` does.
ROW_OPTIONS = ("max_seq_length", "pairing", "mlm_probability", "masking", "max_eval_pairs")


@dataclass
class EvaluationText:
    """
    A text to evaluate on.

    Args:
        name: the names of its sources.
        part: the documents to evaluate on.
    """

    name: str
    part: TextPart

    def sample(self, most_characters: int = SAMPLED_CHARACTERS) -> TextPart:
        """The sentences, or those of evenly spread stretches of about this many characters in all."""
        return self.part.sample(most_characters)

    def sentences(self, most: int, models: list[MaskedModel], max_seq_length: int) -> list[str]:
        """
        A sample of sentences, the same for all models, drawn by `HELD_OUT_SEED`.

        A sentence that has no word to score, or more tokens than `max_seq_length`, for one of the models is left out.
        """
        sample = list(self.sample())
        order = np.random.default_rng(HELD_OUT_SEED).permutation(len(sample)).tolist()
        chosen = []
        for first in range(0, len(order), most):
            tried = [sample[number] for number in order[first : first + most]]
            fits = np.ones(len(tried), dtype=bool)
            for model in models:
                encoded = encode(model, tried, whole_words=True)
                fits &= (encoded.scored_tokens() > 0) & (encoded.lengths() <= max_seq_length)
            chosen += [sentence for sentence, fit in zip(tried, fits, strict=True) if fit]
            if len(chosen) >= most:
                break
        return chosen[:most]


def recorded_run(model: MaskedModel) -> PretrainConfig:
    """
    The options of text and batches of a model's run, by its `run_config.json`; the defaults if it has none.

    Raises:
        UserError: the record has a value that its option cannot have.
    """
    groups = {field.name: field.metadata["group"] for field in dataclasses.fields(PretrainConfig)}
    of_run = model.record.get("run", {}).items()
    run = PretrainConfig(**{name: value for name, value in of_run if groups.get(name) in (TEXT, BATCHES)})
    with explained(f"{model.name}: run_config.json", "", UserError):
        run.check_values()
    return run


def rows_of(model: MaskedModel, config: EvaluateConfig) -> PretrainConfig:
    """The options that decide the rows and masks for a model: those of `config` that are given, else its run's."""
    given = {name: value for name in ROW_OPTIONS if (value := getattr(config, name)) is not None}
    return dataclasses.replace(recorded_run(model), **given)


def held_out_run(models: list[MaskedModel]) -> PretrainConfig:
    """
    The run whose held-out documents the models are evaluated on: that of the first model with a record.

    Raises:
        UserError: no model has one.
    """
    for model in models:
        if model.record:
            return recorded_run(model)
    raise UserError(
        f"{models[0].name}: no run_config.json says which documents its run held out; leave held_out out, or name a "
        f"model of pretrain first"
    )


def read_text(config: EvaluateConfig, run: PretrainConfig) -> EvaluationText:
    """
    Read the text, or find it in the cache.

    Args:
        run: with `config.held_out`, its options decide how the text is read, unless those of `config` do, and which
            documents are held out.

    Raises:
        UserError: a source cannot be read, or there is too little text.
    """
    options = {
        field.name: value
        for field in dataclasses.fields(SourceConfig)
        if (value := getattr(config, field.name)) != EvaluateConfig.__dataclass_fields__[field.name].default
        or not config.held_out
    }
    run = dataclasses.replace(run if config.held_out else PretrainConfig(), **options)
    sources = open_sources(config.corpus, config.dataset, run.dataset_split, run, run.max_documents)
    name, store = read_sources(sources, run.language)
    if not len(store):
        raise UserError(f"{name}: holds no sentence; give more text")
    if not config.held_out:
        return EvaluationText(name, store.part())
    with explained(name, "", UserError):
        documents = held_out_documents(
            store.hashes, store.characters, run.validation_fraction, run.max_validation_characters
        )
    return EvaluationText(f"{name}, held out", store.part(documents))


def check_model_for_text(model: MaskedModel, config: EvaluateConfig) -> None:
    """
    Refuse a model that cannot be evaluated on a text with these options.

    Raises:
        UserError: the tokenizer lacks a special token, or the model has no head for `objective`, or `masking` needs
            the pieces of words that this tokenizer does not mark.
    """
    tokenizer = model.tokenizer
    found = "no head for pairs" if model.task is None else f"a head for {model.task.short}"
    kind = type(tokenizer.backend_tokenizer.model).__name__
    masking = rows_of(model, config).masking
    reasons = {
        "its tokenizer has no cls, sep or pad token, which rows of text need; use --blimp alone": None
        in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id),
        f"it has {found}, not one for objective {config.objective}; leave objective out, or give --objective none": (
            config.objective in PAIR_TASKS and (model.task is None or model.task.key != config.objective)
        ),
        f"its {kind} tokenizer does not say where a word goes on, as masking {masking} needs; give --masking "
        f"token": masking != "token" and kind != "WordPiece",
    }
    refuse_first(reasons, f"{model.name}: ")


def evaluate_text(
    model: MaskedModel, text: EvaluationText, config: EvaluateConfig, max_seq_length: int, accelerator: Accelerator
) -> dict:
    """
    Losses and accuracies of a model on a text, over the pairs and masks that every evaluation of the text has.

    Returns:
        The names of `held_out.held_out_metrics` without `eval_`; `pair_task`, `nsp` or `sop`, or None for a model
        without a head for pairs or with the objective `none`; `pair_head`, the task of the model's head or None;
        `tokens` and `documents` of the text. Every process gets the same figures.

    Raises:
        UserError: the text has no pair of segments, or no token to predict, for this model.
    """
    task = model.task if config.objective == "auto" else PAIR_TASKS.get(config.objective)
    tokens = _tokens(model, text, config, accelerator)
    held_out = _rows(model, text, tokens, config, task, max_seq_length, accelerator)
    if task and not held_out.has_pairs():
        reason = f"no pair for {task.short} in this text, as where each document has one sentence"
        if config.objective != "auto":
            raise UserError(f"{text.name}: {reason}; give --objective none")
        logger.warning(f"{text.name}: {reason}; evaluated are single segments (--objective none)")
        task = None
        held_out = _rows(model, text, tokens, config, task, max_seq_length, accelerator)
    pairs = sum(map(len, held_out.parts()))
    if not pairs:
        raise UserError(f"{text.name}: no segment in this text; give more text")
    with explained(model.name, "", UserError):
        held_out.one()  # raises if there is no token to predict

    def shown(bar):
        for batch in held_out:
            yield batch
            bar.update(len(batch["input_ids"]) * accelerator.num_processes)

    unit = "pairs" if task else "segments"
    with progress_bar(f"{model.name} on {text.name}", pairs, unit) as bar:
        counts = held_out_counts(model, shown(bar), accelerator.device, top_5=True)
    metrics = held_out_metrics(accelerator.reduce(counts, "sum"), task) | held_out.beside()
    return {
        **{name.removeprefix("eval_"): value for name, value in metrics.items()},
        "pair_task": task.key if task else None,
        "pair_head": model.task.key if model.task else None,
        "tokens": len(tokens.ids),
        "documents": len(tokens),
    }


def _rows(model, text, tokens, config, task, max_seq_length, accelerator):
    """The rows that a model is evaluated on: pairs for a task, else single segments."""
    run = dataclasses.replace(
        rows_of(model, config), objective=task.key if task else "none", max_seq_length=max_seq_length
    )
    if not config.held_out:
        run.max_eval_pairs = config.max_eval_pairs
    ranks = Ranks(accelerator.num_processes, accelerator.process_index)
    return HeldOutPairs(tokens, model.tokenizer, run, config.batch_tokens, text.name, ranks)


def _tokens(model, text, config, accelerator):
    """
    The tokenized text.

    Raises:
        UserError: with `held_out`, the text is not what the model's run held out; or no character is left of
            the text.
    """
    data = model.record.get("data", {})
    is_text_of_run = data.get("text_fingerprint") == text.part.text.fingerprint
    if is_text_of_run and not config.held_out:
        way_out = "" if data.get("validation") else "; --held_out evaluates on the part that was held out"
        logger.warning(f"{model.name} was trained on this very text, {text.name}{way_out}")
    asks_for_split = config.held_out and bool(data)
    cases = {
        "its run held nothing out, but had a validation text; give that text, and leave held_out out": (
            asks_for_split and data.get("validation")
        ),
        "its run trained on another text than this one, or read it with other options; give the text of the "
        "run, or leave held_out out": asks_for_split and not is_text_of_run,
    }
    refuse_first(cases, f"{model.name}: ")
    word_unit = data.get("tokenizer", {}).get("word_unit", "white space")
    arguments = (text.part, model.sentence_tokenizer(), cache_folder(), config.processes(), word_unit)
    tokens = TokenizedCorpus(main_first(prepare_tokens, *arguments))
    cases = {
        f"no document of {text.name} holds a token that its tokenizer knows; give other text": not len(tokens),
        "its run held out other documents: give its files in the same order, and no option that reads them otherwise; "
        "a corpus of parts that were prepared apart cannot be held out again": (
            asks_for_split and data.get("held_out_fingerprint") != tokens.fingerprint
        ),
    }
    refuse_first(cases, f"{model.name}: ")
    return tokens


def pseudo_perplexity(
    model: MaskedModel, sentences: list[str], config: EvaluateConfig, accelerator: Accelerator
) -> dict[str, float | int]:
    """
    The pseudo-perplexity of a word: exp(-sum of the sentences' pseudo-log-likelihoods / number of words).

    Salazar et al. (2020, section 2.3) divide by tokens; words, separated by white space, are the same for every
    tokenizer. A word that has an `[UNK]` is left out of both the sum and the count: nothing that it is made of is
    scored, but the model sees it.

    Returns:
        `pseudo_perplexity` (of a word), `pppl_log_likelihood` (nats), and the counts of what is scored:
        `pppl_sentences`, `pppl_words` and `pppl_tokens`. Every process gets the same figures.
    """
    encoded = encode(model, sentences, config.score, whole_words=True)
    tokens, words = int(encoded.scored_tokens().sum()), int(encoded.known_words.sum())
    total = float(scores_of_all(model, encoded, config, accelerator, f"{model.name}: pseudo-perplexity").sum())
    return {
        "pseudo_perplexity": math.exp(-total / words) if -total / words < MAX_LOSS else math.inf,
        "pppl_log_likelihood": total,
        "pppl_sentences": len(sentences),
        "pppl_words": words,
        "pppl_tokens": tokens,
    }
