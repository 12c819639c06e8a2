"""What a model has learnt, in words: examples, advice, the report at the end of a run."""

import shlex

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.messages import counted
from d2l_bert.model_cards.figures import INITIAL_LOSS, formatted, has_collapsed, own_figures
from d2l_bert.pair_tasks import PairTask, pair_task, unit
from d2l_bert.tokenization.python_docs import PYTHON_DOCS
from d2l_bert.training.held_out import mlm_logits


# Sample sentences for models of the embedded corpus, easy to judge for a reader who knows Python.
PYTHON_SENTENCES = [
    "Open the [MASK] and return a file object.",
    "If the file does not exist, an exception is [MASK].",
    "Return [MASK] if the string starts with the given prefix.",
    "Raise a ValueError [MASK] the value is not found.",
    "Return True if the object is an [MASK] of the class.",
]

FULL_STOPS = {".", "!", "?"}

MAX_SENTENCES_TRIED = 10_000  # at most this many held-out sentences are read to find sample sentences

MAX_ENTROPY_DOCUMENTS = 10_000  # at most this many held-out documents are read to count tokens

# Muennighoff et al. (2023), "Scaling Data-Constrained Language Models": four passes over a text are worth as much as
# new text, and after some sixteen more passes add little. Twenty, as MLM masks other tokens in each.
MANY_PASSES = 20

# A run whose MLM loss is above this share of the entropy of the tokens has learnt little more than their frequencies:
# at 0.9, models predict "the", "," and "." nearly everywhere.
LITTLE_LEARNT = 0.9

ROWS_COMPARED = 64  # held-out rows of which `variety` compares the tokens


@torch.no_grad()
def variety(model, batch) -> dict[str, float]:
    """
    How much a model's vectors and predictions differ from token to token. The model is left in evaluation mode.

    Args:
        batch: the model's arguments for held-out rows, of which the first `ROWS_COMPARED` are read.

    Returns:
        `token_cosine`, the mean cosine of the encoder's vectors of two different tokens, over all such pairs: 1
        for an encoder that gives every token the same vector; and `distinct_predictions`, how many different
        tokens the model predicts.
    """
    batch = {name: tensor[:ROWS_COMPARED].to(model.device) for name, tensor in batch.items()}
    inputs = {name: tensor for name, tensor in batch.items() if "label" not in name}
    outputs = model.eval()(**inputs, output_hidden_states=True)
    is_token = batch["attention_mask" if "attention_mask" in batch else "sequence_ids"] != 0
    vectors = F.normalize(outputs.hidden_states[-1][is_token], dim=1)
    _, kinds, counts = batch["input_ids"][is_token].unique(return_inverse=True, return_counts=True)
    # The sum of the cosines of all pairs is the square of the summed vectors; those of equal tokens are taken off.
    by_kind = vectors.new_zeros(len(counts), vectors.shape[1]).index_add_(0, kinds, vectors)
    sum_of_cosines = by_kind.sum(0).square().sum() - by_kind.square().sum()
    pairs_of_different_tokens = len(vectors) ** 2 - counts.square().sum()
    guesses = mlm_logits(outputs).argmax(-1)[batch["labels"] != -100]
    return {
        "token_cosine": float(sum_of_cosines / pairs_of_different_tokens),
        "distinct_predictions": len(guesses.unique()),
    }


@torch.no_grad()
def show_example(model, tokenizer, batch, task: PairTask | None) -> str:
    """
    A held-out example as text for a person. The model is left in evaluation mode.

    The masked tokens stand in brackets; where the model predicts another token, that one stands beside it. With a pair
    task, the label of the pair and its prediction follow.

    Args:
        batch: the model's arguments for one pair, or for one sequence if there is no pair task.
    """
    outputs = model.eval()(**{name: tensor.to(model.device) for name, tensor in batch.items()})
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0][batch["attention_mask"][0] == 1])
    positions = batch["masked_positions"][0].tolist()
    labels = batch["labels"][0].tolist()
    guesses = mlm_logits(outputs)[0].argmax(-1).tolist()
    for position, label, guess in zip(positions, labels, guesses, strict=True):
        if label != -100:
            wrong = "" if guess == label else f", predicted {tokenizer.convert_ids_to_tokens(guess)}"
            tokens[position] = f"[{tokenizer.convert_ids_to_tokens(label)}{wrong}]"
    shown = f"  {' '.join(tokens).replace(' ##', '')}"
    if task:
        truth = task.labels[int(batch["next_sentence_label"].flatten()[0])]
        probability = float(outputs.seq_relationship_logits.float().softmax(-1).flatten()[0])
        guess = task.labels[int(probability < 0.5)]
        shown += f"\n  {task.claim}: {truth}; predicted {guess} (P({task.labels[0]}) = {probability:.2f})"
    return shown


def example_sentences(text, max_length: int, count: int = 5) -> list[str]:
    """
    Sample sentences with one `[MASK]` each: `PYTHON_SENTENCES` for the embedded corpus, else held-out sentences.

    Preferred are sentences of 8 to 40 tokens with a whole word to mask that end in a full stop. Others are used if
    these are too few.

    Args:
        text: a `PreparedText`.
        max_length: the largest number of tokens in a sentence, [CLS] and [SEP] included.
        count: the largest number of held-out sentences.
    """
    if text.corpus_name == PYTHON_DOCS and max_length >= 40:
        return PYTHON_SENTENCES
    preferred, others = _masked_sentences(text.held_out, text.tokenizer, max_length - 4, count)
    found = []
    for ids in preferred + others:
        # Decoding does not restore the original text, which may have had fewer tokens.
        sentence = text.tokenizer.decode(ids)
        has_one_mask = sentence.count(text.tokenizer.mask_token) == 1
        if has_one_mask and len(text.tokenizer(sentence)["input_ids"]) <= max_length:
            found.append(sentence)
        if len(found) == count:
            break
    return found


def _masked_sentences(corpus, tokenizer, most_tokens, count):
    """Random sentences with one token masked, as token ids: up to `count` preferred ones, and those found before."""
    rng = np.random.default_rng(0)
    preferred, others = [], []
    tried = set()
    for document in rng.integers(len(corpus), size=MAX_SENTENCES_TRIED).tolist():
        sentence = int(rng.integers(*corpus.document_starts[document : document + 2]))
        if sentence in tried:
            if len(tried) == len(corpus.sentence_starts) - 1:
                break
            continue
        tried.add(sentence)
        start, end = corpus.sentence_starts[sentence : sentence + 2]
        ids = corpus.ids[start:end].tolist()[:most_tokens]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        whole_words = _whole_words(tokens)
        known = [position for position, token_id in enumerate(ids) if token_id != tokenizer.unk_token_id]
        if not known:
            continue
        ids[int(rng.choice(whole_words or known))] = tokenizer.mask_token_id
        if whole_words and 8 <= len(tokens) <= 40 and tokens[-1] in FULL_STOPS:
            preferred.append(ids)
        else:
            others.append(ids)
        if len(preferred) == count:
            break
    return preferred, others


def _whole_words(tokens):
    """The positions of the words of more than three letters that are one token."""
    found = []
    for position, token in enumerate(tokens):
        is_continued = position + 1 < len(tokens) and tokens[position + 1].startswith("##")
        if token.isalpha() and len(token) > 3 and not is_continued:
            found.append(position)
    return found


def token_entropy(text) -> float:
    """
    The entropy of the held-out tokens in nats: the MLM loss of a model that only knows how frequent each token is.

    `[UNK]` is left out, as it is never predicted.

    Args:
        text: a `PreparedText`. Of a large held-out text, the first `MAX_ENTROPY_DOCUMENTS` documents are counted.
    """
    corpus = text.held_out
    end = corpus.first_tokens(min(len(corpus), MAX_ENTROPY_DOCUMENTS))
    counts = np.bincount(corpus.ids[:end], minlength=len(text.tokenizer))
    counts[text.tokenizer.unk_token_id] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def advice(metrics: dict, train_words: int, is_fresh: bool = True) -> str:
    """
    What to change, in one line, if the encoder has collapsed, or the run took many passes over a small text, or has
    learnt little beyond what it began with; else nothing.

    Args:
        metrics: the content of metrics.json.
        train_words: the number of words in the training text.
        is_fresh: whether the run did not start from a saved model. One that did may well change it by little.
    """
    if has_collapsed(metrics):
        return (
            f"the encoder has collapsed: the vectors of different tokens have a mean cosine of "
            f"{metrics['token_cosine']:.3f}, and of the masked tokens in {ROWS_COMPARED} rows it predicts "
            f"{counted(metrics['distinct_predictions'], 'different one', 'different ones')}; likely the rate "
            f"is too high: lower --learning_rate, or raise --warmup_ratio"
        )
    passes = metrics["train_words_seen"] / train_words
    if round(passes) > MANY_PASSES:
        return (
            f"{passes:,.0f} passes over the text, and more than {MANY_PASSES} add little; give more text, fewer steps "
            f"(--max_steps), or dropout (--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1)"
        )
    loss = metrics["eval_mlm_loss"]
    entropy = metrics["eval_token_entropy"]
    began_with = metrics.get(INITIAL_LOSS, entropy)
    if is_fresh and began_with < entropy and loss > LITTLE_LEARNT * began_with:
        return (
            f"the model has learnt {'little' if loss < began_with else 'nothing'} itself: the bigrams that it started "
            f"from give an MLM loss of {began_with:.2f} nats; train longer (--max_minutes or --max_steps)"
        )
    if loss > LITTLE_LEARNT * entropy:
        return (
            f"the model has learnt {'little more' if loss < entropy else 'less'} than how frequent each token is, "
            f"which alone gives an MLM loss of {entropy:.2f} nats; train longer (--max_minutes or --max_steps)"
        )
    return ""


def closing_text(folder, metrics: dict, example: str, record: dict) -> str:
    """
    The text that a run prints at its end: metrics, an example, filled masks, how to load the model, perhaps a note.

    Args:
        folder: the run's folder.
        metrics: the content of metrics.json.
        example: what `show_example` returned.
        record: the content of run_config.json.
    """
    data = record["data"]
    units = unit(pair_task(metrics))
    lines = [
        "",
        f"What it learnt, on {metrics[f'eval_{units}']:,} held-out {units} with {metrics['eval_masked_tokens']:,} "
        f"masked tokens ({data['tokenizer']['unknown_share']:.1%} of its characters are in [UNK]), on rows as this "
        f"objective has them (`evaluate --objective none` has the same for all):",
        *_figures(metrics),
        _speed(metrics, units),
        "",
        f"A held-out {units.removesuffix('s')}, masked tokens in brackets:",
        example,
        "",
        "Masks filled in:",
    ]
    for filled in metrics["predictions"]:
        guesses = [f"{best['label']} ({best['score']:.2f})" for best in filled["output"]]
        lines += [f"  {filled['text']}", f"    {'  '.join(guesses)}"]
    lines += [
        "",
        f"The model is in {folder}. To use it:",
        f'  d2l-bert fill-mask {shlex.quote(str(folder))} "..."',
        f'  or, in Python, after `import d2l_bert`: pipeline("fill-mask", model={str(folder)!r})',
    ]
    note = advice(metrics, data["train_words"], is_fresh=record["run"]["init_from"] is None)
    if note:
        lines += ["", f"Note: {note}"]
    return "\n".join(lines)


def _figures(metrics):
    """A line for each held-out figure, and one for what a model has that knows nothing."""
    lines = []
    for figure in own_figures(metrics):
        lines.append(f"  {figure.name}: {formatted(metrics[figure.key], figure.unit)}")
    entropy = metrics["eval_token_entropy"]
    of_nothing = f"  knowing only how frequent each token is: an MLM loss of {entropy:.3f} nats"
    task = pair_task(metrics)
    if task:
        of_nothing += f"; {task.short} has a loss of 0.693 nats and an accuracy of 50% by chance"
    return [*lines, of_nothing]


def _speed(metrics, units):
    """A line on the time and the speed of a run, which counts `units`."""
    return (
        f"  trained in {metrics['train_seconds']:.0f} s at {metrics[f'train_{units}_per_second']:,.0f} {units}/s, "
        f"{metrics['train_tokens_per_second']:,.0f} tokens/s, {metrics['train_mfu']:.1%} of the peak (MFU); "
        f"{metrics['train_padding_share']:.1%} of the tokens computed were padding; "
        f"{metrics['train_skipped_steps']:,} steps were skipped, as they were not finite"
    )
