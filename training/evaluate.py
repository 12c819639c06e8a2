"""What a model has learnt: held-out figures, and predictions to look at."""

import itertools
import math
import shlex

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.errors import UserError
from d2l_bert.pair_tasks import PairTask, pair_task, unit
from d2l_bert.tokenization.sources import PYTHON_DOCS
from d2l_bert.training.step import count_examples


# What a newcomer can judge at a glance, for models of the embedded corpus.
PYTHON_SENTENCES = [
    "Open the [MASK] and return a file object.",
    "If the file does not exist, an exception is [MASK].",
    "Return [MASK] if the string starts with the given prefix.",
    "Raise a ValueError [MASK] the value is not found.",
    "Return True if the object is an [MASK] of the class.",
]

MOST_TRIED = 10_000  # held-out sentences that are looked at for an example

MOST_NATS = 700  # of a loss; its perplexity would be no float any more

COUNTS = ("mlm_loss", "mlm_correct", "masked_tokens", "pair_loss", "pair_correct", "examples")


@torch.no_grad()
def held_out_counts(model, batches, device) -> torch.Tensor:
    """
    Sums over batches, float64, in the order of `COUNTS`: they can be added up over processes before they are divided.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM`, or a wrapper of one.
        batches: dicts of the model's arguments, with `masked_positions`, `labels` and, for the first model,
            `next_sentence_label`. Without it `pair_loss` and `pair_correct` are 0.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(COUNTS), dtype=torch.float64, device=device)
    for batch in batches:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        outputs = model(**batch)
        found = [*_sums(_mlm_logits(outputs), batch["labels"])]
        if "next_sentence_label" in batch:
            found += _sums(outputs.seq_relationship_logits, batch["next_sentence_label"])
        else:
            found += [*sums.new_zeros(2), count_examples(batch)]
        sums += torch.stack([value.double() for value in found])
    model.train(was_training)
    return sums


def _mlm_logits(outputs):
    return outputs.get("prediction_logits", outputs.get("logits"))


def _sums(logits, labels):
    known = labels != -100
    logits, labels = logits[known].float(), labels[known]
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(-1) == labels).sum(), known.sum()


def held_out_figures(sums: torch.Tensor, task: PairTask | None) -> dict[str, float]:
    """
    The figures that `held_out_counts` adds up to.

    Returns:
        `eval_mlm_loss` (nats a masked token), `eval_perplexity`, `eval_mlm_accuracy`, `eval_masked_tokens`; with a
        task, by its name, `eval_nsp_loss` (nats a pair), `eval_nsp_accuracy` and `eval_pairs`, else `eval_sequences`.
    """
    mlm_loss, mlm_correct, tokens, pair_loss, pair_correct, examples = sums.tolist()
    figures = {
        "eval_mlm_loss": mlm_loss / tokens,
        "eval_perplexity": math.exp(loss) if (loss := mlm_loss / tokens) < MOST_NATS else math.inf,
        "eval_mlm_accuracy": mlm_correct / tokens,
    }
    if task:
        figures[f"eval_{task.key}_loss"] = pair_loss / examples
        figures[f"eval_{task.key}_accuracy"] = pair_correct / examples
    return {**figures, "eval_masked_tokens": int(tokens), f"eval_{unit(task)}": int(examples)}


@torch.no_grad()
def fill_mask(model, tokenizer, texts: list[str], top_k: int = 5) -> list[list[list[tuple[str, float]]]]:
    """
    The likeliest tokens for each `[MASK]` of each text, as pairs of token and probability.

    Raises:
        UserError: a text without a mask, or longer than the model's positions.
    """
    model.eval()
    predictions = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        _check_length(text, encoded, model)
        masked_positions = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:, 0]
        if not len(masked_positions):
            raise UserError(f"no {tokenizer.mask_token} in {text!r}: put it where a word is to be predicted")
        logits = model(**encoded, masked_positions=masked_positions[None]).logits[0]  # (P, V)
        best = logits.float().softmax(-1).topk(min(top_k, logits.shape[-1]))
        predictions.append(
            [
                [(tokenizer.convert_ids_to_tokens(int(i)), float(p)) for p, i in zip(*row, strict=True)]
                for row in zip(best.values, best.indices, strict=True)
            ]
        )
    return predictions


def _check_length(text, encoded, model):
    length, limit = encoded["input_ids"].shape[1], model.config.max_position_embeddings
    if length > limit:
        raise UserError(f"{text[:40]!r}...: {length} tokens, and the model has {limit} positions; shorten it")


@torch.no_grad()
def showcase(model, tokenizer, batch, task: PairTask | None) -> str:
    """
    One held-out pair as text: each masked token marked, the model's prediction beside it, and what it made of the
    pair; without a task of pairs, one sequence.
    """
    model.eval()
    outputs = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})
    ids = batch["input_ids"][0].clone()
    known = batch["labels"][0] != -100
    positions, labels = batch["masked_positions"][0][known], batch["labels"][0][known]
    guesses = _mlm_logits(outputs)[0].argmax(-1).cpu()[known]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    lines = []
    for position, label, guess in zip(positions.tolist(), labels.tolist(), guesses.tolist(), strict=True):
        truth, shown = tokenizer.convert_ids_to_tokens([label, int(ids[position])])
        tokens[position] = f"[{truth}]"
        mark = "=" if guess == label else " "
        lines.append(f"    {mark} {truth:<20} {tokenizer.convert_ids_to_tokens(guess):<20} (it saw {shown})")
    segments = batch["token_type_ids"][0]
    real = batch["attention_mask"][0] == 1
    shown = [
        f"  {name}: "
        + _join([token for token, s, r in zip(tokens, segments, real, strict=True) if r and s == segment])
        for segment, name in enumerate("AB" if task else "A")
    ]
    shown += [f"    {'':1} {'truth':<20} {'prediction':<20}", *lines]
    if task:
        truth = task.labels[int(batch["next_sentence_label"].flatten()[0])]
        probability = float(outputs.seq_relationship_logits.float().softmax(-1).flatten()[0])
        guess = task.labels[int(probability < 0.5)]
        shown.append(f"  {task.claim}: {truth}; predicted {guess} (P({task.labels[0]}) = {probability:.2f})")
    return "\n".join(shown)


def _join(tokens):
    words = [token for token in tokens if token not in ("[CLS]", "[SEP]")]
    return " ".join(words).replace(" ##", "").replace(" [##", "[##")


def example_sentences(text, max_length: int, count: int = 5) -> list[str]:
    """Sentences with one token masked: about Python for the embedded corpus, else out of the held-out documents.

    At most `max_length` tokens each, the two special ones included. Whole words are masked where there are any.
    """
    if text.corpus_name == PYTHON_DOCS and max_length >= 40:
        return PYTHON_SENTENCES
    rng = np.random.default_rng(0)
    tokenizer, sentences, unusual = text.tokenizer, [], []
    documents = text.held_out_documents.tolist()
    sizes = [len(text.tokens.sentence_ends(document)) for document in documents]
    up_to = np.cumsum(sizes)
    for place in rng.choice(up_to[-1], min(up_to[-1], MOST_TRIED), replace=False).tolist():
        number = int(np.searchsorted(up_to, place, side="right"))
        document, sentence = documents[number], place - int(up_to[number]) + sizes[number]
        ends = text.tokens.sentence_ends(document)
        ids = text.tokens.tokens(document)[ends[sentence - 1] if sentence else 0 : ends[sentence]].tolist()
        tokens = tokenizer.convert_ids_to_tokens(ids)
        whole = [
            place
            for place, token in enumerate(tokens)
            if token.isalpha() and len(token) > 3 and not "".join(tokens[place + 1 : place + 2]).startswith("##")
        ]
        usual = bool(whole) and 8 <= len(tokens) <= 40
        ids = ids[: max_length - 4]
        maskable = [place for place in whole if place < len(ids)] or range(len(ids))
        ids[int(rng.choice(maskable))] = tokenizer.mask_token_id
        (sentences if usual else unusual).append(tokenizer.decode(ids))
        if len(sentences) == count:
            break
    # What was decoded may fall apart into more tokens than before.
    fitting = (
        s
        for s in sentences + unusual
        if s.count(tokenizer.mask_token) == 1 and len(tokenizer(s)["input_ids"]) <= max_length
    )
    return list(itertools.islice(fitting, count))


def report(folder, model, tokenizer, metrics: dict, example: dict, predictions: list) -> str:
    """What a run learnt, for a person to read: figures, a held-out example, masks filled in, and how to load it."""
    task = pair_task(metrics)
    units = unit(task)
    speed = f"{metrics[f'train_{units}_per_second']:,.0f} {'sentence ' if task else ''}{units}/s"
    pair_figures = ""
    if task:
        loss, accuracy = metrics[f"eval_{task.key}_loss"], metrics[f"eval_{task.key}_accuracy"]
        pair_figures = f"\n  {task.short} loss {loss:.3f} nats, accuracy {accuracy:.1%}{task.note}"
    left_out = metrics["train_skipped_steps"]
    skipped = f"\n  steps left out, their loss or gradient not being finite: {left_out:,}" if left_out else ""
    best = "\n".join(
        f"  {sentence}\n    " + "  ".join(f"{token} ({probability:.2f})" for token, probability in tokens)
        for sentence, tokens in predictions
    )
    return f"""
What it learnt, on {metrics[f"eval_{units}"]:,} held-out {units} with {metrics["eval_masked_tokens"]:,} masked tokens:
  MLM loss {metrics["eval_mlm_loss"]:.3f} nats, perplexity {metrics["eval_perplexity"]:.1f}, \
accuracy {metrics["eval_mlm_accuracy"]:.1%}{pair_figures}
  trained in {metrics["train_seconds"]:.0f} s at {speed}, \
{metrics["train_tokens_per_second"]:,.0f} tokens/s, {metrics["train_mfu"]:.1%} of the peak (MFU); \
{metrics["train_padding_share"]:.1%} of the tokens computed were padding{skipped}

A held-out {units[:-1]}, masked tokens in brackets:
{showcase(model, tokenizer, example, task)}

Masks filled in:
{best}

The model is in {folder}. To use it:
  d2l-bert fill-mask {shlex.quote(str(folder))} "..."
  or, in Python, after `import d2l_bert`: pipeline("fill-mask", model={str(folder)!r})"""
