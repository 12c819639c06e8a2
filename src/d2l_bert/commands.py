"""What each command of `d2l-bert` does with its arguments."""

import ctypes
import dataclasses
import sys
from pathlib import Path

from d2l_bert.errors import UserError, another_kind, reading_model, reading_tokenizer, refusals_are_the_users


def pretrain_command(arguments) -> None:
    """Start from a recipe, change what was given, and train."""
    from d2l_bert.training.distributed import said_once
    from d2l_bert.training.pretrain import pretrain

    with said_once():
        architecture, run = resolve_pretrain(arguments)
    keep_freed_memory()  # before the text is read: what that frees is one large piece, in which steps find room
    pretrain(architecture, run)


def keep_freed_memory() -> None:
    """
    Have glibc keep what a step frees for the next one.

    It would give every large tensor back to the system, which clears each page of it before it comes again: on two
    cores that is a tenth of a step. What reading the text has freed is kept too, until the process ends. So it is for
    the command, whose process ends with the run, and not for `pretrain` called from a program.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD of malloc.h: never
        libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; older ones take 32 MiB at most


def resolve_pretrain(arguments) -> tuple:
    """The architecture and the run that the arguments of `pretrain` ask for."""
    from d2l_bert.options import check_texts
    from d2l_bert.tokenization.config import TextConfig
    from d2l_bert.tokenization.prepare import is_prepared
    from d2l_bert.training.recipes import RECIPES, architecture_options, changed

    given = vars(arguments)
    architecture, run = RECIPES[arguments.recipe]()
    _refuse_what_a_tokenizer_settles(given)
    run = changed(run, {field.name: given[field.name] for field in dataclasses.fields(run) if field.name in given})
    check_texts(run)  # an empty path would be looked up as the working directory
    if "init_from" in given:
        architecture = _start_architecture(given)
    for field in dataclasses.fields(TextConfig):
        if field.name in given and field.name != "corpus" and is_prepared(run):
            raise UserError(
                f"{field.name} is settled in the prepared folder {run.text_paths()[0]}; leave it out, or prepare anew"
            )
    changes = {name: given[name] for name in architecture_options() if name in given}
    with refusals_are_the_users():
        return type(architecture)(**{**architecture.to_dict(), **changes}), run


def prepare_command(arguments) -> None:
    """Train a tokenizer and tokenize a text, once for many runs."""
    from d2l_bert.folders import new_folder
    from d2l_bert.tokenization.config import TextConfig
    from d2l_bert.tokenization.prepare import write_prepared

    given = vars(arguments)
    _refuse_what_a_tokenizer_settles(given)
    run = TextConfig(
        **{field.name: given[field.name] for field in dataclasses.fields(TextConfig) if field.name in given}
    )
    run.check()
    with new_folder(Path(arguments.output_dir)) as folder:
        text = write_prepared(run, folder)
    print(text.summary())
    print(f"train on it: d2l-bert pretrain --corpus {arguments.output_dir}")


def _refuse_what_a_tokenizer_settles(given):
    from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS

    existing = next((name for name in ("tokenizer", "init_from") if name in given), None)
    for name in TOKENIZER_TRAINING_OPTIONS:
        # Words are added from a frequency on.
        if existing and name in given and not (name == "min_frequency" and given.get("extend_vocab")):
            raise UserError(
                f"{name} is for training a tokenizer, and {existing} gives one that exists ({given[existing]}); "
                f"leave {name} out"
            )


def _start_architecture(given):
    """That of the model in `init_from`; the recipe's makes way, the user's is refused."""
    from d2l_bert.modeling.saving import FREE_FIELDS
    from d2l_bert.training.initialize import read_architecture
    from d2l_bert.training.recipes import architecture_options

    for name in architecture_options():
        if name in given and name not in FREE_FIELDS:
            raise UserError(f"{name} is settled by the model in init_from ({given['init_from']}); leave {name} out")
    return read_architecture(given["init_from"])


def fill_mask_command(arguments) -> None:
    """Print the likeliest tokens for each mask of each text."""
    from d2l_bert import D2lBertForMaskedLM
    from d2l_bert.training.evaluate import fill_mask

    model, tokenizer = _load(D2lBertForMaskedLM, arguments.model)
    for text, predictions in zip(
        arguments.text, fill_mask(model, tokenizer, arguments.text, arguments.top_k), strict=True
    ):
        print(text)
        for number, best in enumerate(predictions, 1):
            if len(predictions) > 1:
                print(f"  mask {number}")
            for token, probability in best:
                print(f"  {probability:6.1%}  {token:<20} {_bar(probability)}".rstrip())


def next_sentence_command(arguments) -> None:
    """Print whether the second sentence follows the first."""
    from d2l_bert import D2lBertForNextSentencePrediction, NextSentencePredictionPipeline

    model, tokenizer = _load(D2lBertForNextSentencePrediction, arguments.model)
    predict = NextSentencePredictionPipeline(model=model, tokenizer=tokenizer)
    answer = predict({"text": arguments.first, "text_pair": arguments.second})
    for label in predict.labels:
        share = answer["score"] if label == answer["label"] else 1 - answer["score"]
        print(f"  {share:6.1%}  {label:<20} {_bar(share)}".rstrip())


def convert_command(arguments) -> None:
    """Turn a checkpoint of the book's or of stock BERT's into ours, or ours into one of theirs."""
    from transformers.utils import logging

    from d2l_bert import folders
    from d2l_bert.tokenization.wordpiece import save_tokenizer

    logging.disable_progress_bar()
    from_d2l = arguments.source_kind == "d2l"
    if not from_d2l and (arguments.num_attention_heads or arguments.vocab):
        raise UserError("num_attention_heads and vocab are for --from d2l; leave them out")
    if from_d2l and not arguments.num_attention_heads:
        raise UserError("a d2l state dict does not tell its heads; give --num_attention_heads")
    source, target = arguments.source, Path(arguments.target)
    with folders.new_folder(target) as folder:
        if from_d2l:
            made, tokenizer = _convert_from_d2l(source, arguments.num_attention_heads, arguments.vocab, folder)
        elif arguments.source_kind == "bert":
            made, tokenizer = _convert_from_bert(source, folder)
        else:
            made, tokenizer = _convert_ours(source, arguments.target_kind, folder)
        if tokenizer is not None and arguments.target_kind != "d2l":  # which has a vocabulary of its own kind
            save_tokenizer(tokenizer, folder)
    print(f"{target}: {made}")
    if tokenizer is None:
        mend = "; its vocabulary makes one: --vocab FILE" if from_d2l else ""
        print(f"{source} brings no tokenizer, so {target} has none{mend}")


def _convert_from_d2l(source, num_attention_heads, vocabulary, folder):
    from d2l_bert.modeling import d2l_checkpoints
    from d2l_bert.modeling.d2l_checkpoints import d2l_tokenizer, read_d2l, read_vocabulary
    from d2l_bert.modeling.saving import save_with_code

    beside = Path(source) / "vocab.json"
    vocabulary = vocabulary or (beside if beside.exists() else None)
    with refusals_are_the_users():
        tokens = vocabulary and read_vocabulary(vocabulary)
    with reading_model(source):
        model = d2l_checkpoints.from_d2l(read_d2l(source), num_attention_heads, tokens)
    with refusals_are_the_users():
        tokenizer = tokens and d2l_tokenizer(tokens, model.config.max_position_embeddings)
    save_with_code(model, folder)
    return _what(model), tokenizer


def _convert_from_bert(source, folder):
    from d2l_bert.modeling.bert_checkpoints import copy_sentence_transformer, from_bert, read_bert
    from d2l_bert.modeling.saving import save_with_code
    from d2l_bert.tokenization.existing import read_tokenizer

    with reading_model(source):
        bert, unplaced = read_bert(source)
        tokenizer = read_tokenizer(source, bert.config)
    with refusals_are_the_users(f"{source}: cannot be converted: "):
        model = from_bert(bert)
    save_with_code(model, folder)
    with reading_model(source):
        copy_sentence_transformer(source, folder)
    if unplaced:
        print(f"left behind, having no place in a {type(model).__name__}: {', '.join(unplaced)}")
    return _what(model), tokenizer


def _convert_ours(source, target_kind, folder):
    from d2l_bert.modeling import conversion
    from d2l_bert.modeling.bert_checkpoints import copy_sentence_transformer, to_bert
    from d2l_bert.modeling.d2l_checkpoints import write_d2l
    from d2l_bert.modeling.saving import save_model
    from d2l_bert.tokenization.existing import read_tokenizer

    with reading_model(source):
        model = conversion.read_ours(source)
        tokenizer = read_tokenizer(source, model.config)
    if target_kind == "d2l":
        with refusals_are_the_users():
            write_d2l(model, tokenizer, folder)
        return _what(model, "d2l BERTModel"), tokenizer
    with refusals_are_the_users():
        model = to_bert(model)
    save_model(model, folder)
    with reading_model(source):
        copy_sentence_transformer(source, folder)
    return _what(model), tokenizer


def publish_command(arguments) -> None:
    """Check a model folder and send it to the Hub."""
    from transformers.utils import logging

    from d2l_bert.model_cards.config import PublishConfig
    from d2l_bert.model_cards.publish import publish

    logging.disable_progress_bar()
    given = vars(arguments)
    config = PublishConfig(**{f.name: given[f.name] for f in dataclasses.fields(PublishConfig) if f.name in given})
    print(publish(Path(arguments.folder), arguments.repo_id, config))


def _what(model, name=None):
    return f"a {name or type(model).__name__} of {model.num_parameters():,} parameters"


def _load(model_class, name):
    from transformers import AutoConfig
    from transformers.utils import logging

    from d2l_bert.modeling import conversion
    from d2l_bert.tokenization.existing import stock_tokenizer

    logging.disable_progress_bar()
    with reading_model(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if not isinstance(config, model_class.config_class):
            raise UserError(another_kind(name, config.model_type))
        model, missing, _ = conversion.load_and_compare(model_class, name)
        if missing:
            raise UserError(_without(name, missing, config))
        with reading_tokenizer(name):
            tokenizer = stock_tokenizer(name)
        if len(tokenizer) != config.vocab_size:
            raise UserError(
                f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the tokenizer "
                f"that it was trained with"
            )
    return model, tokenizer


def _without(name, missing, config):
    """Why a model whose weights lack `missing` cannot do what was asked for, and what to do about it."""
    lacking, saved_as = f"it has no weights for {min(missing)}", (config.architectures or ["D2lBertForPreTraining"])[0]
    heads = {"mlm.": "MLM", "nsp.": "NSP"}  # both belong to D2lBertForPreTraining
    head = next((heads[part] for part in heads if any(weight.startswith(part) for weight in missing)), None)
    has_head = {"MLM": "ForMaskedLM", "NSP": "ForNextSentencePrediction"}
    if head is None or saved_as.endswith(("ForPreTraining", has_head[head])):
        return f"{lacking}, which its config.json asks for; save the model there again with save_pretrained"
    if head == "NSP" and saved_as.endswith("ForMaskedLM"):
        return (
            f"{lacking}: it was trained without an NSP head (--objective none) and does fill-mask alone; "
            f"d2l-bert pretrain --init_from {name} --objective nsp trains one"
        )
    return f"{lacking}: it was saved as {saved_as}, without an {head} head; give what d2l-bert pretrain has left"


def _bar(share):
    return "█" * round(30 * share)
