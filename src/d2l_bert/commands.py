"""One function for each command of `d2l-bert`, called with the command's parsed arguments."""

import contextlib
import ctypes
import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, PreTrainedTokenizerFast
from transformers.utils import logging

from d2l_bert import NextSentencePredictionPipeline, folders
from d2l_bert.demo import make_demo
from d2l_bert.errors import UserError, explained, reading_model, refuse_first, value_errors_for_user
from d2l_bert.folders import new_folder
from d2l_bert.model_cards.card import carry_card
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.publish import publish
from d2l_bert.modeling import bert_checkpoints, conversion, d2l_checkpoints, export
from d2l_bert.modeling.conversion import FREE_FIELDS
from d2l_bert.page import TASKS as PAGE_TASKS
from d2l_bert.page import copy_runtime, write_page
from d2l_bert.progress import shortened
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.tokenization.prepared_folder import (
    corpus_is_prepared,
    is_prepared_folder,
    read_prepared_folder,
    read_prepared_folders,
    write_prepared_folder,
)
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.distributed import report_errors_once
from d2l_bert.training.evaluation.config import EvaluateConfig, ExportConfig
from d2l_bert.training.evaluation.exported import cost_of_int8
from d2l_bert.training.evaluation.run import evaluate
from d2l_bert.training.existing_tokenizers import prepare_with_tokenizer, read_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.run import finetune
from d2l_bert.training.initialize import read_architecture
from d2l_bert.training.load_models import load_pretrained
from d2l_bert.training.openmp import short_waits
from d2l_bert.training.pretrain import pretrain
from d2l_bert.training.recipes import RECIPES, architecture_options, override_options
from d2l_bert.training.run_report import fill_mask
from d2l_bert.training.vectors.attention import compare_word, draw_attention
from d2l_bert.training.vectors.config import AttentionConfig, EmbedConfig
from d2l_bert.training.vectors.embed import embed


def pretrain_command(arguments) -> None:
    """Train the model that the recipe and the given flags describe."""
    with report_errors_once():
        architecture, run = resolve_pretrain(arguments)
    keep_freed_memory()  # before the text is read: reading frees one large piece of memory, which the steps then use
    pretrain(architecture, run)


def keep_freed_memory() -> None:
    """
    Make glibc keep the memory that one step frees for the next step.

    By default, glibc returns the memory of every large tensor to the system, which clears each page before the next
    use. When it keeps the memory, steps of the book's small BERT are 8 % faster on two cores, and the process takes
    0.7 GB more (benchmarks/LOG.md). Memory that was freed after reading the text stays in the process, too, until the
    process ends. The command accepts that, as its process ends with the run; `pretrain`, called from a program, leaves
    the allocator alone.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD (malloc.h): never return memory to the system
        libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: 1 GiB; an older glibc allows 32 MiB


def resolve_pretrain(arguments) -> tuple:
    """
    The architecture (a `D2lBertConfig`) and the run (a `PretrainConfig`) that the arguments of `pretrain` ask for.

    Raises:
        UserError: a flag contradicts the prepared folder, the tokenizer or the model that another flag gives.
    """
    given = vars(arguments)
    architecture, run = RECIPES[arguments.recipe]()
    _refuse_options_of_another_tokenizer(given)
    run = override_options(
        run, {field.name: given[field.name] for field in dataclasses.fields(run) if field.name in given}
    )
    run.check_values()  # an empty path would be looked up as the working directory
    prepared = run.text_paths()[0] if corpus_is_prepared(run) else None
    # What a prepared folder does not fix: how a validation text is read, too, if there is one.
    free = {"corpus", "max_unknown_share"}
    if run.validation_corpus or run.validation_dataset:
        free |= {"text_column", "separator", "streaming", "preprocessing_num_workers"}
    cases = {
        f"{name} is fixed by the model in init_from ({given.get('init_from')}); leave {name} out": (
            "init_from" in given and name in given and name not in FREE_FIELDS
        )
        for name in architecture_options()
    }
    cases |= {
        f"{field.name} is fixed by the prepared folder {prepared}; leave {field.name} out, or prepare the text "
        f"again": prepared and field.name in given and field.name not in free
        for field in dataclasses.fields(TextConfig)
    }
    refuse_first(cases)
    if "init_from" in given:
        architecture = read_architecture(given["init_from"])
    changes = {name: given[name] for name in architecture_options() if name in given}
    with value_errors_for_user():
        return type(architecture)(**{**architecture.to_dict(), **changes}), run


def prepare_command(arguments) -> None:
    """
    Train a tokenizer and tokenize a text, once for many runs; print a summary and the command that trains on it.

    With `check`: read every byte of prepared folders instead, one folder after the other, and print a line for each
    that is whole. The first damaged folder ends the command; the folders after it are not read. Several folders must
    be parts of one corpus, too: with the same tokenizer and options.
    """
    given = vars(arguments)
    others = [field.name for field in dataclasses.fields(TextConfig) if field.name in given]
    if arguments.check:
        for name in (*others, *(["output_dir"] if arguments.output_dir else [])):
            raise UserError(f"{name} is for preparing a text, and check reads folders that are prepared; leave it out")
        for folder in map(Path, arguments.check):
            if not is_prepared_folder(folder):
                raise UserError(f"{folder}: no prepared folder; give one that `d2l-bert prepare` has made")
            text = read_prepared_folder(folder, check_large=True)
            documents, tokens = len(text.train) + len(text.held_out), len(text.train.ids) + len(text.held_out.ids)
            print(f"{folder}: whole; {documents:,} documents, {tokens:,} tokens")
        if len(arguments.check) > 1:  # whether they are parts of one corpus
            read_prepared_folders([Path(folder) for folder in arguments.check])
        return
    if not arguments.output_dir:
        raise UserError("output_dir is missing: give --output_dir DIR, a new folder to write into")
    _refuse_options_of_another_tokenizer(given)
    run = _options_of(TextConfig, arguments)
    run.check()
    if corpus_is_prepared(run):
        raise UserError(f"corpus {run.text_paths()[0]}: is prepared already; give its text")
    with new_folder(Path(arguments.output_dir)) as folder:
        text = prepare_with_tokenizer(run)
        write_prepared_folder(text, folder)
    print(text.summary())
    print(f"train on it: d2l-bert pretrain --corpus {arguments.output_dir}")


def _refuse_options_of_another_tokenizer(given):
    """Refuse options that train a tokenizer, if `tokenizer` or `init_from` gives an existing tokenizer."""
    existing = next((name for name in ("tokenizer", "init_from") if name in given), None)
    for name in TOKENIZER_TRAINING_OPTIONS:
        # extend_vocab also uses min_frequency, and goes with an existing tokenizer.
        if existing and name in given and not (name == "min_frequency" and given.get("extend_vocab")):
            raise UserError(
                f"{name} is for training a tokenizer, and {existing} gives one that exists ({given[existing]}); "
                f"leave {name} out"
            )


def evaluate_command(arguments) -> None:
    """Evaluate models on a text and on minimal pairs, and print the table of their figures."""
    evaluate(arguments.model, _options_of(EvaluateConfig, arguments))


def finetune_command(arguments) -> None:
    """Fine-tune a model for a task, and print the table of its figures."""
    keep_freed_memory()
    finetune(_options_of(FinetuneConfig, arguments))


def fill_mask_command(arguments) -> None:
    """Print the most probable tokens for each [MASK] of each text."""
    model, tokenizer, _ = load_pretrained(AutoModelForMaskedLM, arguments.model)
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
    """Print the probability of each label for two sentences: whether the second follows the first."""
    model, tokenizer, _ = load_pretrained(AutoModelForNextSentencePrediction, arguments.model)
    predict = NextSentencePredictionPipeline(model=model, tokenizer=tokenizer)
    answer = predict({"text": arguments.first, "text_pair": arguments.second})
    for label in predict.labels:
        share = answer["score"] if label == answer["label"] else 1 - answer["score"]
        print(f"  {share:6.1%}  {label:<20} {_bar(share)}".rstrip())


def embed_command(arguments) -> None:
    """Write a vector for each line of a file, or print the lines nearest to a text, or both."""
    config = _options_of(EmbedConfig, arguments)
    with short_waits():
        done = embed(arguments.model, arguments.file, config)
    if config.output is not None:
        print(f"{config.output}: {done.lines:,} vectors of {done.size:,} numbers, one for each line")
    width = max((len(f"{number:,}") for _, number, _ in done.nearest), default=0)
    for cosine, number, text in done.nearest:
        print(f"  {cosine:7.4f}  line {number:>{width},}  {shortened(text, 160)}")


def attention_command(arguments) -> None:
    """Draw a model's attention for a text or a pair, or print how far apart a word's vectors are in two texts."""
    config = _options_of(AttentionConfig, arguments)
    config.check()
    if config.word is not None and arguments.second is None:
        raise UserError(f"word {config.word!r} is compared in two texts; give TEXT_B too")

    if config.word is None:
        print(draw_attention(arguments.model, arguments.first, arguments.second, config))
    else:
        print(compare_word(arguments.model, config.word, arguments.first, arguments.second))


def convert_command(arguments) -> None:
    """Convert a checkpoint of d2l (the book's model) or of stock BERT to a d2l-bert model, or the other way round."""
    logging.disable_progress_bar()
    source, heads, vocabulary = arguments.source, arguments.num_attention_heads, arguments.vocab
    is_from_d2l, is_to_d2l = arguments.source_kind == "d2l", arguments.target_kind == "d2l"
    if is_from_d2l != bool(heads) or (vocabulary and not is_from_d2l):
        raise UserError(
            "--from d2l needs --num_attention_heads N, and may have --vocab; other conversions have neither"
        )
    unused = []
    with folders.new_folder(Path(arguments.target)) as folder, value_errors_for_user(f"{source}: not converted: "):
        if is_from_d2l:
            if vocabulary is None and (Path(source) / "vocab.json").exists():
                vocabulary = Path(source) / "vocab.json"
            tokens = vocabulary and d2l_checkpoints.read_vocabulary(vocabulary)
            with reading_model(source):
                model = d2l_checkpoints.from_d2l(d2l_checkpoints.read_d2l(source), heads, tokens)
            tokenizer = tokens and d2l_checkpoints.d2l_tokenizer(tokens, model.config.max_position_embeddings)
        else:
            with reading_model(source):
                model, unused = bert_checkpoints.read_bert(source) if arguments.source_kind else (None, [])
                model = model or conversion.read_ours(source)
                tokenizer = read_tokenizer(source, model.config)
                bert_checkpoints.copy_sentence_transformer(source, folder)
            if arguments.source_kind:
                model = bert_checkpoints.from_bert(model)
            elif arguments.target_kind == "bert":
                model = bert_checkpoints.to_bert(model)
        if is_to_d2l:
            d2l_checkpoints.write_d2l(model, tokenizer, folder)  # and a vocab.json
        else:
            conversion.save_with_code(model, folder) if arguments.source_kind else conversion.save_model(model, folder)
            if tokenizer:
                save_tokenizer(tokenizer, folder)
            if arguments.target_kind == "bert":
                carry_card(source, folder, Path(arguments.target).resolve().name)
    name = "d2l BERTModel" if is_to_d2l else type(model).__name__
    print(f"{arguments.target}: a {name} of {model.num_parameters():,} parameters")
    if unused:
        print(f"left out, as a {name} has no such weights: {', '.join(unused)}")
    if not tokenizer:
        way_out = "; give its vocabulary with --vocab FILE to make one" if is_from_d2l else ""
        print(f"{source} brings no tokenizer, so {arguments.target} has none{way_out}")


def export_command(arguments) -> None:
    """Write a model as stock BERT and ONNX, compare the files with it, and print how they compare."""
    logging.disable_progress_bar()
    config, source = _options_of(ExportConfig, arguments), arguments.source
    config.check()
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            raise UserError(f"export needs {package}: pip install 'd2l-bert[onnx]'")
    with contextlib.ExitStack() as stack:
        stack.enter_context(value_errors_for_user(f"{source}: not exported: "))
        folder = stack.enter_context(new_folder(Path(arguments.target)))
        page = stack.enter_context(new_folder(Path(config.page))) if config.page else None
        with reading_model(source):
            model, saved, task = export.read_for_task(source, config.task)
            tokenizer = read_tokenizer(source, model.config)
        refuse_first(
            {
                "the model has no tokenizer; put its tokenizer.json beside it": tokenizer is None,
                f"a page shows {' or '.join(PAGE_TASKS)}, not {task}; leave --page out": page
                and task not in PAGE_TASKS,
                "a page shows one class of several, not numbers or several labels; leave --page out": page
                and model.config.problem_type in ("regression", "multi_label_classification"),
                "--onnx_only writes no card and no page; leave it or --page out": page and config.onnx_only,
            }
        )
        if page:  # first, as it may need the network
            copy_runtime(page, config.runtime)
        is_whole = export.task_of(saved) == task
        published = saved if is_whole else model
        compared = {}
        if config.onnx_only:
            (folder / "config.json").write_text(model.config.to_json_string())
        else:
            stock = bert_checkpoints.to_bert(published)
            conversion.save_model(stock, folder)
            bert_checkpoints.copy_sentence_transformer(source, folder)
            compared["model.safetensors"] = export.largest_difference(published, stock)
        save_tokenizer(tokenizer, folder)
        export.write_onnx(model, task, folder)
        for file in (export.FLOAT, export.INT8):
            compared[file] = export.largest_difference(model, export.OnnxModel(folder / file, model.config))
        compared = {
            file: {"bytes": (folder / file).stat().st_size, "difference": difference}
            for file, difference in compared.items()
        }
        cost = cost_of_int8(folder, model.config, task, config.corpus)
        if not config.onnx_only:
            name, measured = Path(arguments.target).resolve().name, {"task": task, "files": compared, "int8": cost}
            carry_card(source, folder, name, is_whole, measured)
        if page:
            write_page(folder, page, name, task)
    print(f"{arguments.target}: {type(model).__name__} of {model.num_parameters():,} parameters, for {task}")
    for file, found in compared.items():
        print(f"  {file:<26} {found['bytes']:>13,} bytes  outputs differ by at most {found['difference']:.1e}")
    print(
        f"  int8 beside float32, on {cost['text']} ({cost['unknown_share']:.1%} of its characters in [UNK]): "
        f"{cost['figure']} {cost['int8']:.4f} ({cost['float32']:.4f}), {cost['speed']:.2f} times as fast"
    )
    if type(tokenizer) is PreTrainedTokenizerFast and model.config.type_vocab_size > 1:
        print(
            "transformers.js gives a pair its segments for a BertTokenizer alone: call this tokenizer with "
            "{ text_pair, return_token_type_ids: true }; the question-answering pipeline there cannot take it"
        )
    if page:
        print(f"the page: python -m http.server --bind 127.0.0.1 --directory {config.page}")


def demo_command(arguments) -> None:
    """Serve a page on which one tries models, until Ctrl-C."""
    page = make_demo(arguments.model)
    with explained(f"port {arguments.port}: cannot be used", "give another --port", OSError, OverflowError):
        page.launch(server_name="127.0.0.1", server_port=arguments.port, share=False)


def publish_command(arguments) -> None:
    """Check a model folder, send it to the Hub, and print where it is and how to load it."""
    logging.disable_progress_bar()
    print(publish(Path(arguments.folder), arguments.repo_id, _options_of(PublishConfig, arguments)))


def _options_of(config_class, arguments):
    """The option dataclass with the values of the flags that were given."""
    given = vars(arguments)
    return config_class(**{f.name: given[f.name] for f in dataclasses.fields(config_class) if f.name in given})


def _bar(share):
    return "█" * round(30 * share)
