"""Of two errors at once the one that is checked first is shown: options of every command, models, folders, texts."""

import errno
import itertools
import traceback

import pytest
from conftest import SIZES
from finetuning import load
from text_sources import write_table
from transformers import BertConfig

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.folders import locked
from d2l_bert.inference.config import AttentionConfig, EmbedConfig
from d2l_bert.messages import UserError, explained, reading_model, writing
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.modeling.config import ExportConfig
from d2l_bert.modeling.conversion import our_config
from d2l_bert.modeling.d2l_checkpoints import to_d2l
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig
from d2l_bert.training.initialize import read_architecture, start_from
from d2l_bert.training.pretrain import check_options, lack_of_memory_explained
from d2l_bert.training.run_folder import check_identity, check_output_folder, check_same_identity


def refusal_of(check, *arguments):
    """The message of the `UserError` that a call raises, whose traceback shows no other error."""
    with pytest.raises(UserError) as caught:
        check(*arguments)
    assert "\n\n" not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def assert_first_is_shown(refusal, errors):
    """
    Of each two errors that can be made at once, the first is shown.

    Args:
        refusal: the message for what a dict asks for.
        errors: dicts with one error each, in the order of the checks. A dict names every value that decides whether
            its error is one, so that two dicts that differ in none have both errors together.
    """
    alone = [refusal(error) for error in errors]
    for first, second in itertools.combinations(range(len(errors)), 2):
        shared = errors[first].keys() & errors[second].keys()
        if all(errors[first][name] == errors[second][name] for name in shared):
            both = {**errors[first], **errors[second]}
            assert refusal(both) == alone[first] != alone[second], both


# ---------------------------------------------------------------------------------------------------------------------
# Options


# For each command, options without an error; then errors in the order of the checks.
TEXT_ERRORS = [
    {"dataset": [""]},  # a value by itself
    {"streaming": True},  # without the option that it is for
]
OF_TEXT_AND_TOKENIZER = [
    {"pre_tokenizer": "words"},
    {"language": "English"},
    {"corpus": []},
]
OPTIONS = {
    TextConfig: ({}, [*TEXT_ERRORS, *OF_TEXT_AND_TOKENIZER, {"extend_vocab": 9}]),
    PretrainConfig: (
        {"max_steps": 9},
        [
            *TEXT_ERRORS,
            {"validation_split": "dev"},
            {"hub_model_id": "me/x"},
            {"mlm_probability": "some"},
            {"length_schedule": ["32:2"]},
            {"batch_size_schedule": ["8:2"]},
            *OF_TEXT_AND_TOKENIZER,
            {"extend_vocab": 9, "init_from": None},
            {"num_train_epochs": 2.0},
            {"validation_corpus": ["a"], "validation_fraction": 0.2},
            {"validation_corpus": ["a"], "max_validation_characters": 9},
            {"mlm_probability": "2->0.1"},
            {"mask_replace_prob": 0.8, "random_replace_prob": 0.3},
            {"lr_scheduler_type": "warmup_stable_decay", "warmup_ratio": 0.5, "decay_ratio": 0.6},
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
            {"source_weights": ["many"]},
            {"source_weights": ["0", "0"]},
            {"init_from": "a", "attention_init": "neighbours"},
        ],
    ),
    EvaluateConfig: (
        {"blimp": "pairs"},
        [
            {"corpus": [""]},
            {"line_masks": 3, "line_scores": None},
            {"blimp": None, "line_scores": None},
            {"line_scores": "a.txt"},
            {"max_documents": 3},
            {"held_out": True},
            {"mlm_probability": 0.2},
            {"pppl_sentences": 0},
            {"output": "figures.txt"},
            {"text_column": "a"},
            {"separator": "tab"},
        ],
    ),
    FinetuneConfig: (
        {"model": "m", "task": "text-classification", "train_file": "a.csv"},
        [
            {"seed": -1},
            {"hub_model_id": "me/x"},
            {"learning_rate": ["fast"]},
            {"license": "none such"},
            {"task": "translation"},
            {"learning_rate": ["1000"]},
            {"dataset": "a", "train_file": "a.csv"},
            {"train_file": None, "dataset": None},
            {"context_column": "a"},
            {"question_column": "a"},
            {"choices_column": ["a"]},
            {"label_separator": ";"},
            {"doc_stride": 3},
            {"max_answer_length": 3},
            {"null_score_diff_threshold": 0.5},
            {"train_split": "a", "train_file": "a.csv"},
            {"validation_split": "b", "train_file": "a.csv"},
            {"test_split": "c", "train_file": "a.csv"},
            {"validation_share": 0.5, "validation_file": "b.csv"},
            {"label_column": ["a", "b"]},
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
            {"lr_scheduler_type": "constant", "warmup_steps": 3, "warmup_ratio": None},
            {"num_train_epochs": 2.0, "max_steps": 3},
            {"warmup_ratio": 0.1, "warmup_steps": 3},
            {"bf16": True, "fp16": True},
            {"eval_steps": 9, "max_steps": 3},
            {"validation_share": 0.0, "early_stopping_patience": 3},
            {"validation_share": 0.0, "metric_for_best_model": "loss"},
            {"validation_share": 0.0, "eval_steps": 1},
            {"validation_share": 0.0, "learning_rate": ["1", "2"]},
        ],
    ),
    PredictConfig: (
        {"output": "a.csv"},
        [{"per_device_eval_batch_size": 0}, {"output": "a.txt"}, {"output": "a.jsonl", "excel": True}],
    ),
    PublishConfig: ({}, [{"license": ""}, {"public": True, "create_pr": True}]),
    ExportConfig: (
        {},
        [
            {"task": "translation"},
            {"runtime": "a", "page": None},
            {"page": "a", "runtime": None},
            {"page": "a", "runtime": "b", "onnx_only": True},
        ],
    ),
    EmbedConfig: ({"nearest": ["a"]}, [{"batch_tokens": 0}, {"output": "a.txt"}]),
    AttentionConfig: (
        {},
        [
            {"layer": 0},
            {"word": "a", "output": "b.png"},
            {"word": "a", "layer": 1, "output": "attention.png"},
            {"word": "a", "head": 1, "output": "attention.png"},
            {"output": "b.jpg"},
        ],
    ),
}


@pytest.mark.parametrize("command", OPTIONS, ids=lambda command: command.__name__)
def test_of_two_errors_in_options_the_first_in_the_order_of_the_checks_is_shown(command):
    valid, errors = OPTIONS[command]
    command(**valid).check()
    assert_first_is_shown(lambda error: refusal_of(command(**{**valid, **error}).check), errors)


def test_of_two_errors_in_a_run_and_its_architecture_the_first_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    valid = {"corpus": ["books"], "max_steps": 9, "max_seq_length": 32, "objective": "nsp"}
    errors = [
        {"max_steps": None},
        {"save_words": ["few"]},
        {"license": "none such"},
        {"type_vocab_size": 1},
        {"max_seq_length": 64},
        {"output_dir": "books/out"},
        {"source_weights": ["1", "2"]},
        {"report_to": ["paper"]},
    ]

    def refusal(error):
        architecture = dict(SIZES)
        run = dict(valid)
        for name, value in error.items():
            of = architecture if name == "type_vocab_size" else run
            of[name] = value
        return refusal_of(check_options, D2lBertConfig(**architecture), PretrainConfig(**run))

    check_options(D2lBertConfig(**SIZES), PretrainConfig(**valid))
    assert_first_is_shown(refusal, errors)


# ---------------------------------------------------------------------------------------------------------------------
# Models, folders and rows


def test_of_two_errors_in_a_stock_bert_the_first_is_shown():
    errors = [{"is_decoder": True}, {"position_embedding_type": "relative_key"}, {"hidden_act": "silu"}]
    assert_first_is_shown(lambda error: refusal_of(our_config, BertConfig(**error)), errors)


def test_of_two_reasons_against_the_books_class_the_first_is_shown():
    valid = {"hidden_act": "relu", "embedding_layer_norm": False, "layer_norm_eps": 1e-5, "type_vocab_size": 2}
    errors = [
        {"class": D2lBertForMaskedLM},
        {"hidden_act": "gelu"},
        {"embedding_layer_norm": True},
        {"layer_norm_eps": 1e-12},
        {"type_vocab_size": 3},
    ]

    def model(error):
        values = {**SIZES, **valid, **error}
        return values.pop("class", D2lBertForPreTraining)(D2lBertConfig(**values))

    to_d2l(model({}))
    assert_first_is_shown(lambda error: refusal_of(to_d2l, model(error)), errors)


def test_of_two_errors_in_a_vocabulary_the_first_is_shown(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    errors = [{"words": words[1:]}, {"twice": ["a"]}]

    def refusal(error):
        entries = error.get("words", words) + error.get("twice", [])
        (tmp_path / "vocab.txt").write_text("\n".join(entries) + "\n")
        return refusal_of(load_tokenizer, str(tmp_path / "vocab.txt"))

    assert_first_is_shown(refusal, errors)


def test_of_two_differences_between_runs_and_between_processes_the_first_is_shown():
    then = {"rate": 1, "seed": 2, "the text": 3}
    errors = [{name: 9} for name in then]
    assert_first_is_shown(lambda error: refusal_of(check_identity, then, {**then, **error}, "folder"), errors)

    errors = [{"process 1": "seed"}, {"process 2": "rate"}, {"process 3": "rate"}]

    def refusal(error):
        others = [{**then, error.get(f"process {number}", "none"): 9} for number in (1, 2, 3)]
        return refusal_of(check_same_identity, [then, *({name: one[name] for name in then} for one in others)])

    assert_first_is_shown(refusal, errors)


def test_of_two_reasons_against_an_output_folder_the_first_is_shown(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")

    def refusal(error):
        run = PretrainConfig(
            overwrite_output_dir=error.get("overwrite", False), resume_from_checkpoint=error.get("resume")
        )
        given = (run, folder, error.get("start"), error.get("is_finetuning", False))
        return refusal_of(check_output_folder, *given)

    assert refusal({"start": folder}) != refusal({})  # the model to start from, before other files
    (folder / "run_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    errors = [
        {"start": folder},
        {"is_finetuning": True},
        {"overwrite": True, "resume": "latest"},
        {"overwrite": True, "resume": "elsewhere/checkpoint-1"},
    ]
    assert_first_is_shown(refusal, errors[:3])
    assert_first_is_shown(refusal, [*errors[:2], errors[3]])
    finished = refusal({})
    (folder / "checkpoint-1").mkdir()
    assert finished != refusal({})  # a finished run without checkpoints, before one to go on with


def test_of_two_errors_in_rows_the_first_is_shown(tmp_path):
    """Labels that are no answer of MNLI beside one that is; and a label of its own in every row."""

    def refusal(*labels):
        rows = [{"premise": "a", "hypothesis": f"b {label}", "label": label} for label in labels]
        return refusal_of(load, write_table(tmp_path / "rows.jsonl", rows), "mnli")

    mixed = refusal("neutral", "x", "y", "y")
    own = refusal("x", "y", "z")
    assert refusal("neutral", "x", "y") == mixed != own


def test_of_two_differences_from_the_model_to_start_from_the_first_is_shown(trained):
    saved = read_architecture(str(trained)).to_dict()
    errors = [{"hidden_size": 64}, {"intermediate_size": 9}, {"initializer_range": 0.5}]

    def refusal(error):
        run = PretrainConfig(init_from=str(trained), max_steps=1)
        return refusal_of(start_from, run, D2lBertConfig(**{**saved, **error}))

    assert_first_is_shown(refusal, errors)


# ---------------------------------------------------------------------------------------------------------------------
# A message in place of another error


def raise_in(block, error):
    """Raise an error in a `with` block."""
    with block:
        raise error


@pytest.mark.parametrize(
    "block, error",
    [
        (writing("folder"), OSError(errno.ENOSPC, "full")),
        (explained("file", "give another", ValueError), ValueError("odd")),
        (reading_model("nowhere"), KeyError("odd")),
        (lack_of_memory_explained(), RuntimeError("out of memory")),
    ],
    ids=["writing", "explained", "reading_model", "lack_of_memory_explained"],
)
def test_a_message_in_place_of_another_error_is_shown_alone(block, error):
    assert refusal_of(raise_in, block, error)


def test_a_lock_that_another_has_is_shown_alone(tmp_path):
    with locked(tmp_path / "lock", "in use"):
        assert refusal_of(raise_in, locked(tmp_path / "lock", "in use"), ValueError()) == "in use"
