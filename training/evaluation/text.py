"""The text of `d2l-bert evaluate`: read once, tokenized for each model; MLM and pair figures; pseudo-perplexity."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence

import numpy as np
from accelerate import Accelerator

from d2l_bert import messages
from d2l_bert.options import BATCHES, TEXT
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization import account, cache, coverage, encoding, prepare, sources, text_store, token_store
from d2l_bert.tokenization.config import SourceConfig
from d2l_bert.training import held_out, processes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Ranks
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.pseudo_likelihood import encode, pseudo_log_likelihoods


logger = logging.getLogger(__name__)

# What a model's run decides of its rows, unless an option of `EvaluateConfig` does.
ROW_OPTIONS = ("max_seq_length", "pairing", "mlm_probability", "masking", "max_eval_pairs")

# Options of a model's run that must be the same for all models, so that their figures can be compared. Where they
# differ, all get the default; of different values of `max_seq_length`, all get the least.
SHARED_OPTIONS = (
    *("pairing", "short_seq_prob", "mlm_probability", "masking", "mask_replace_prob", "random_replace_prob"),
    "max_eval_pairs",
)


def sample_sentences(
    part: text_store.TextPart, most: int, models: list[MaskedModel], max_seq_length: int
) -> list[str]:
    """
    A sample of a text's sentences for pseudo-perplexity, the same for all models, drawn by `HELD_OUT_SEED`.

    A sentence that has no word to score, or more tokens than `max_seq_length`, for one of the models is left out.
    """

    def fits(sentence):
        encoded = [encode(model, [sentence], whole_words=True) for model in models]
        return all(each.scored_tokens[0] and each.lengths[0] <= max_seq_length for each in encoded)

    sample = list(part.sample(prepare.SAMPLED_CHARACTERS))
    order = np.random.default_rng(held_out.HELD_OUT_SEED).permutation(len(sample)).tolist()
    fitting = (sample[number] for number in order if fits(sample[number]))
    return list(itertools.islice(fitting, most))


def options_for(model: MaskedModel, config: EvaluateConfig) -> PretrainConfig:
    """
    The options of the rows of a text for a model: those that `config` gives, else `recorded_options`.

    `max_seq_length` is at most the positions of the model, and without `config.held_out` the model's run does not
    decide `max_eval_pairs`.

    Raises:
        UserError: the record has a value that its option cannot have; the tokenizer lacks a special token; the model
            has fewer positions than `max_seq_length`, or no head for `objective`; or `masking` needs the pieces of
            words that this tokenizer does not mark.
    """
    given = {}
    for name in ROW_OPTIONS:
        if getattr(config, name) is not None:
            given[name] = getattr(config, name)
    options = dataclasses.replace(recorded_options(model), **given)
    tokenizer = model.tokenizer
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id):
        raise messages.UserError(
            f"{model.name}: its tokenizer has no cls, sep or pad token, which rows of text need; use --blimp alone"
        )
    if config.max_seq_length is not None and config.max_seq_length > model.most_positions:
        raise messages.UserError(
            f"{model.name}: max_seq_length {config.max_seq_length}: it has {model.most_positions} positions; give no "
            f"more"
        )
    if config.objective in PAIR_TASKS and model.task is not PAIR_TASKS[config.objective]:
        raise messages.UserError(
            f"{model.name}: it has no head for objective {config.objective}; leave objective out, or give --objective "
            f"none"
        )
    if options.masking != "token" and type(tokenizer.backend_tokenizer.model).__name__ != "WordPiece":
        raise messages.UserError(
            f"{model.name}: its tokenizer does not say where a word goes on, as masking {options.masking} needs; give "
            f"--masking token"
        )
    return dataclasses.replace(
        options,
        max_seq_length=min(options.max_seq_length, model.most_positions),
        max_eval_pairs=options.max_eval_pairs if config.held_out else config.max_eval_pairs,
    )


def recorded_options(model: MaskedModel) -> PretrainConfig:
    """
    The options of text and rows of a model's run, by its `run_config.json`, else the defaults; `mlm_probability` is
    the share at the end of the run.

    Raises:
        UserError: the record has a value that its option cannot have.
    """
    of_run = model.record.get("run", {})
    recorded = {}
    for field in dataclasses.fields(PretrainConfig):
        if field.name in of_run and field.metadata["group"] in (TEXT, BATCHES):
            recorded[field.name] = of_run[field.name]
    options = PretrainConfig(**recorded)
    with messages.explained(f"{model.name}: run_config.json", "", messages.UserError):
        options.check_values()
        share = options.mlm_probabilities()[1]
        if not 0 < share <= 1:
            raise messages.UserError(f"mlm_probability must be a number in (0, 1], got {share}")
    return dataclasses.replace(options, mlm_probability=share)


def options_for_all(models: Sequence[MaskedModel], config: EvaluateConfig) -> PretrainConfig:
    """
    The options of the rows for all models, so that their figures can be compared: those of `options_for`. Where these
    differ, the models have the default of `pretrain`, and this is logged.

    Raises:
        UserError: as in `options_for`, for one of the models.
    """
    of_models = [options_for(model, config) for model in models]
    length = min(options.max_seq_length for options in of_models)
    shared = dataclasses.replace(of_models[0], max_seq_length=length)
    for name in SHARED_OPTIONS:
        values = [getattr(options, name) for options in of_models]
        if any(value != values[0] for value in values):
            default = getattr(PretrainConfig(), name)
            shared = dataclasses.replace(shared, **{name: default})
            different = ", ".join(str(value) for value in dict.fromkeys(values))
            way_out = f"; --{name} gives all another" if name in ROW_OPTIONS else ""
            logger.warning(
                f"{name} differs in the models' runs ({different}): all are measured with {default}, to be "
                f"compared{way_out}"
            )
    return shared


def read_text(config: EvaluateConfig, model: MaskedModel) -> tuple[str, text_store.TextPart]:
    """
    Read the text, or find it in the cache.

    Args:
        model: with `config.held_out`, the options of its run decide how the text is read, unless those of `config` do,
            and which documents are held out.

    Returns:
        The names of its sources, and the documents to evaluate on.

    Raises:
        UserError: a source cannot be read, or there is too little text.
    """
    given = {}
    for field in dataclasses.fields(SourceConfig):
        if field.name in config.given():
            given[field.name] = getattr(config, field.name)
    options = PretrainConfig(dataset_split=config.dataset_split)
    if config.held_out:
        options = options_for(model, config)
    options = dataclasses.replace(options, **given)
    what = sources.WhatToRead(paths=config.corpus, datasets=config.dataset, split=options.dataset_split)
    shown = account.Account()
    text = prepare.read_sources(sources.open_sources(what, sources.HowToRead.of(options)), options.language, shown)
    shown.say(account.counts_line(text.name, text.reading))
    store = text.store
    if not len(store):
        raise messages.UserError(f"{text.name}: holds no sentence; give more text")
    if not config.held_out:
        return text.name, store.part()
    with messages.explained(text.name, "", messages.UserError):
        documents = text_store.held_out_documents(
            store.hashes, store.characters, options.validation_fraction, options.max_validation_characters
        )
    return f"{text.name}, held out", store.part(documents)


def evaluate_text(
    model: MaskedModel,
    name: str,
    part: text_store.TextPart,
    config: EvaluateConfig,
    options: PretrainConfig,
    accelerator: Accelerator,
) -> dict:
    """
    Losses and accuracies of a model on a text, over the pairs and masks that every evaluation of the text has.

    Args:
        name, part: the text, as from `read_text`.
        options: those of the rows but the objective, as from `options_for_all`.

    Returns:
        The names of `held_out.held_out_metrics` without `eval_`; `pair_task`, `nsp` or `sop`, or None for a model
        without a head for pairs or with the objective `none`; `pair_head`, the task of the model's head or None;
        `tokens` and `documents` of the text; and `unknown_share`, the share of its characters in `[UNK]`. Every
        process gets the same figures.

    Raises:
        UserError: the text has no pair of segments, or no token to predict, for this model.
    """
    tokens = _tokens(model, name, part, config)

    def rows_for(task):
        of_task = dataclasses.replace(options, objective=task.key if task else "none")
        ranks = Ranks(accelerator.num_processes, accelerator.process_index)
        return held_out.HeldOutPairs(tokens, model.tokenizer, of_task, config.batch_tokens, name, ranks)

    task = model.task if config.objective == "auto" else PAIR_TASKS.get(config.objective)
    rows = rows_for(task)
    if task and config.objective == "auto" and not rows.has_pairs():
        logger.warning(
            f"{name}: no pair for {task.short} in this text, as where each document has one sentence; evaluated are "
            f"single segments (--objective none)"
        )
        task = None
        rows = rows_for(None)
    with messages.explained(model.name, "", messages.UserError):
        rows.first_with_target()  # raises if there is no row, or no token to predict

    def rows_of_all_processes(batch):
        return len(batch["input_ids"]) * accelerator.num_processes

    count = sum(len(each) for each in rows.parts())
    batches = messages.with_progress(rows, f"{model.name} on {name}", count, rows_of_all_processes, "row")
    counts = held_out.held_out_counts(model, batches, accelerator.device, top_5=True)
    metrics = held_out.held_out_metrics(accelerator.reduce(counts, "sum"), task) | rows.one_segment_accuracy()
    figures = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    figures["pair_task"] = task.key if task else None
    figures["pair_head"] = model.task.key if model.task else None
    figures["tokens"] = len(tokens.ids)
    figures["documents"] = len(tokens)
    figures["unknown_share"] = coverage.measure_unknown_share(model.tokenizer, part.sample(prepare.SAMPLED_CHARACTERS))
    return figures


def _tokens(model, name, part, config):
    """
    The tokenized text.

    Raises:
        UserError: with `held_out`, the text is not what the model's run held out; or no character is left of
            the text.
    """
    data = model.record.get("data", {})
    is_text_of_run = data.get("text_fingerprint") == part.store.fingerprint
    if is_text_of_run and not config.held_out:
        way_out = "" if data.get("validation") else "; --held_out takes what its run held out"
        logger.warning(f"{model.name} was trained on this very text, {name}{way_out}")
    tokens = token_store.TokenizedCorpus(
        processes.main_first(
            encoding.prepare_tokens,
            part,
            model.sentence_tokenizer(),
            cache.cache_folder(),
            config.processes(),
            data.get("tokenizer", {}).get("word_unit", "white space"),
        )
    )
    asks_for_split = config.held_out and bool(data)
    if asks_for_split and data.get("validation"):
        raise messages.UserError(
            f"{model.name}: its run held nothing out, but had a validation text; give that text, and leave held_out "
            f"out"
        )
    if asks_for_split and not is_text_of_run:
        raise messages.UserError(
            f"{model.name}: its run trained on another text than this one, or read it with other options; give the "
            f"text of the run, or leave held_out out"
        )
    if not len(tokens):
        raise messages.UserError(
            f"{model.name}: no document of {name} holds a token that its tokenizer knows; give other text"
        )
    if asks_for_split and data.get("held_out_fingerprint") != tokens.fingerprint:
        raise messages.UserError(
            f"{model.name}: its run held out other documents: give its files in the same order, and no option that "
            f"reads them otherwise; a corpus of parts that were prepared apart cannot be held out again"
        )
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
    scores = pseudo_log_likelihoods(model, encoded, config, accelerator, f"{model.name}: pseudo-perplexity")
    total = float(scores.sum())
    words = int(encoded.known_words.sum())
    loss = -total / words
    return {
        "pseudo_perplexity": math.exp(loss) if loss < held_out.MAX_LOSS else math.inf,
        "pppl_log_likelihood": total,
        "pppl_sentences": len(sentences),
        "pppl_words": words,
        "pppl_tokens": int(encoded.scored_tokens.sum()),
    }
