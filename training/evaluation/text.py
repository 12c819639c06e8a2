"""The text of `d2l-bert evaluate`: read once, tokenized for each model; MLM and pair figures; pseudo-perplexity."""

import logging
import math
from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator

from d2l_bert.errors import UserError, explained, refuse_first
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.progress import progress_bar
from d2l_bert.tokenization.cache import cache_folder
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.prepare import (
    default_processes,
    documents_with_tokens,
    open_sources,
    read_sources,
)
from d2l_bert.tokenization.sentences import Cleaning
from d2l_bert.tokenization.text_store import SentenceSample, TextStore
from d2l_bert.tokenization.token_store import HELD_OUT_SEED, AllBut, Only, TokenizedCorpus, held_out_documents
from d2l_bert.training.data import BatchMaker, HeldOutPairs
from d2l_bert.training.distributed import on_main
from d2l_bert.training.epochs import Selection
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.pseudo_likelihood import encode, scores_of_all
from d2l_bert.training.held_out import MAX_LOSS, held_out_counts, held_out_metrics
from d2l_bert.training.openmp import short_waits
from d2l_bert.training.packing import Sharding


logger = logging.getLogger(__name__)

# What is sampled of a text, for pseudo-perplexity and the share of `[UNK]`: stretches of this many characters in all.
SAMPLED_CHARACTERS = 2_000_000


@dataclass
class EvaluationText:
    """
    A text to evaluate on.

    Args:
        name: the names of its sources.
        store: its sentences.
        documents: the numbers of the documents to evaluate on, ascending; None for all.
    """

    name: str
    store: TextStore
    documents: np.ndarray | None = None

    def sample(self, most_characters: int = SAMPLED_CHARACTERS) -> SentenceSample:
        """The sentences, or those of evenly spread stretches of about this many characters in all."""
        documents = np.arange(len(self.store)) if self.documents is None else self.documents
        return SentenceSample(self.store, documents, most_characters=most_characters)

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


def read_text(config: EvaluateConfig) -> EvaluationText:
    """
    Read the text, or find it in the cache.

    Raises:
        UserError: a source cannot be read, or there is too little text.
    """
    sources = open_sources(config.corpus, config.named_datasets(), config.dataset_split, config, config.max_documents)
    name, store = read_sources(sources, config.language, Cleaning("none", 0, False))
    if not len(store):
        raise UserError(f"{name}: holds no sentence; give more text")
    if not config.held_out:
        return EvaluationText(name, store)
    usual = TextConfig()
    with explained(name, "", UserError):
        documents = held_out_documents(
            store.document_characters, usual.validation_fraction, usual.max_validation_characters
        )
    return EvaluationText(f"{name}, held out", store, documents)


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
    reasons = {
        "its tokenizer has no cls, sep or pad token, which rows of text need; use --blimp alone": None
        in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id),
        f"it has {found}, not one for objective {config.objective}; leave objective out, or give --objective none": (
            config.objective in PAIR_TASKS and (model.task is None or model.task.key != config.objective)
        ),
        f"its {kind} tokenizer does not say where a word goes on, as masking {config.masking} needs; give --masking "
        f"token": config.masking != "token" and kind != "WordPiece",
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
    tokens, documents = _tokens(model, text, config, accelerator)
    data = model.record.get("data", {})
    if text.documents is None and data.get("corpus_fingerprint") == tokens.fingerprint():
        held_out = "" if data.get("validation") else "; --held_out evaluates on the part that was held out"
        logger.warning(f"{model.name} was trained on this very text, {text.name}{held_out}")
    if task is not None and task.key == "nsp" and len(documents) < 2:
        raise UserError(
            f"{text.name}: {len(documents)} document, and random second segments need two; give more text, or "
            f"--objective none"
        )
    make_batch = BatchMaker(
        tokens, model.tokenizer, config.mlm_probability, max_seq_length, config.masking, task.key if task else "none"
    )
    entries = model.model.config.vocab_size
    held_out = HeldOutPairs(
        Selection(tokens, documents, [len(tokens)], is_one_stretch=isinstance(documents, Only)),
        {"pairing": config.pairing, "max_seq_length": max_seq_length, "objective": task.key if task else "none"},
        make_batch,
        # All logits of a batch are in memory at a time.
        max(max_seq_length, min(config.batch_tokens, int(LOGITS_AT_ONCE / entries / config.mlm_probability))),
        config.max_eval_pairs,
        Sharding(accelerator.num_processes, accelerator.process_index),
        text.name,
    )
    pairs = sum(len(pairs) for pairs, _ in held_out.parts())
    if not pairs:
        raise UserError(f"{text.name}: no {'pair of segments' if task else 'segment'} in this text; give more text")
    with explained(model.name, "", UserError):
        held_out.one()  # raises if there is no token to predict

    def shown(bar):
        for batch in held_out:
            yield batch
            bar.update(len(batch["input_ids"]) * accelerator.num_processes)

    unit = "pairs" if task else "segments"
    with progress_bar(f"{model.name} on {text.name}", pairs, unit) as bar, short_waits():
        counts = held_out_counts(model, shown(bar), accelerator.device, top_5=True)
    metrics = held_out_metrics(accelerator.reduce(counts, "sum"), task)
    return {
        **{name.removeprefix("eval_"): value for name, value in metrics.items()},
        "pair_task": task.key if task else None,
        "pair_head": model.task.key if model.task else None,
        "tokens": int(tokens.sizes(documents.nth(np.arange(len(documents)))).sum()),
        "documents": len(documents),
    }


def _tokens(model, text, config, accelerator):
    """The tokenized text, and the selection of its documents."""
    processes = config.preprocessing_num_workers or default_processes()
    arguments = (text.store, model.sentence_tokenizer(), cache_folder(), processes)
    path = on_main(accelerator, prepare_tokens, *arguments, share_result=False)
    if path is None:  # the main process wrote the tokens into this cache, or into that of another machine
        path = prepare_tokens(*arguments)
    tokens = TokenizedCorpus(path)
    if text.documents is None:
        documents = AllBut(len(tokens), np.zeros(0, dtype=np.int64))
    else:
        documents = Only(documents_with_tokens(text.documents, tokens))
    if not len(documents):
        raise UserError(f"{text.name}: no document holds a token that the tokenizer of {model.name} knows")
    return tokens, documents


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
