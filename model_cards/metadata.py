"""Checks the metadata of a model card by the rules of the Hub, before anything is sent."""

import datetime
import difflib
import math
import os
import re

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from d2l_bert.errors import UserError


# The list in the Hub's answer to an unknown licence (POST /api/validate-yaml). The Hub's OpenAPI description has the
# same list, and https://huggingface.co/docs/hub/repositories-licenses an older one.
LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    grok2-community gemma unknown other
""".split()
# https://github.com/huggingface/huggingface.js/blob/main/packages/tasks/src/pipelines.ts; the Hub
# warns of other tasks.
TASKS = """
    biology text-classification token-classification table-question-answering question-answering
    zero-shot-classification translation summarization feature-extraction text-generation text2text-generation
    fill-mask sentence-similarity text-to-speech text-to-audio automatic-speech-recognition audio-to-audio
    audio-classification audio-text-to-text voice-activity-detection depth-estimation image-classification
    object-detection image-segmentation text-to-image image-to-text image-to-image image-to-video
    unconditional-image-generation video-classification reinforcement-learning robotics tabular-classification
    tabular-regression tabular-to-text table-to-text multiple-choice text-ranking text-retrieval
    time-series-forecasting text-to-video image-text-to-text image-text-to-image image-text-to-video video-to-video
    visual-question-answering document-question-answering zero-shot-image-classification graph-ml mask-generation
    zero-shot-object-detection text-to-3d image-to-3d image-feature-extraction video-text-to-text keypoint-detection
    visual-document-retrieval any-to-any other
""".split()
# https://huggingface.co/docs/hub/model-cards#specifying-a-base-model
RELATIONS = ["adapter", "merge", "quantized", "finetune"]
# A dataset.type in model-index must match this pattern, which the Hub's error message shows.
DATASET_TYPE = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
# The Hub's rules for license_name and license_link, which `license: other` needs. The link is a file in the folder
# or an address.
LICENSE_NAME = re.compile(r"[a-z0-9.-]+")
LICENSE_LINK = re.compile(r"https?://\S+|[\w.-]*licen[cs]e[\w.-]*", re.ASCII | re.IGNORECASE)
DATA_SUFFIXES = tuple(".txt .md .json .jsonl .csv .tsv .parquet .arrow .gz .zst .zip".split())


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, as the Hub does; PyYAML takes the last value."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} appears twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_metadata(card: str) -> dict:
    """
    The metadata at the top of a model card.

    Args:
        card: the text of README.md.

    Raises:
        UserError: the card has no metadata, or the metadata is not valid YAML, has a duplicate key, or is no mapping.
    """
    block, _ = split_card(card)
    try:
        metadata = yaml.load(block, _Loader)
    except Exception as error:  # PyYAML raises other errors too, such as ValueError for a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f", line {card[: card.index(block)].count(chr(10)) + mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise UserError(f"the card's metadata{where}: not valid YAML ({_line(reason)}); mend it") from None
    if not isinstance(metadata, dict):
        raise UserError(f"the card's metadata is {_shown(metadata)}; give it as lines of `key: value`")
    return metadata


def split_card(card: str) -> tuple[str, str]:
    """
    Split a card into the YAML block at the top, and the text after the block.

    Raises:
        UserError: the card does not begin with a YAML block.
    """
    card = card.removeprefix("\ufeff")
    block = REGEX_YAML_BLOCK.search(card)
    if not block:
        raise UserError("the card has no metadata; begin it with a block of YAML between two lines of ---")
    return block[2], card[block.end() :]


def check_metadata(metadata: dict, mask_token: str | None = None) -> None:
    """
    Refuse metadata that the Hub would refuse or show wrongly. Keys that the Hub does not know are not checked.

    The rules are those of https://huggingface.co/docs/hub/model-cards, of the specification at
    https://github.com/huggingface/hub-docs/blob/main/modelcard.md, and of the error messages of the Hub.

    Args:
        metadata: what `read_metadata` returned.
        mask_token: the token that each text of the widget needs; None if the texts are not checked.

    Raises:
        UserError: the first problem, in one line.
    """
    for key in metadata:
        _text("a key", key)
    given = {key: value for key, value in metadata.items() if value is not None}
    _check_licenses(given)
    checks = {
        "language": _check_languages,
        "library_name": _text,
        "pipeline_tag": lambda key, value: _one_of(key, value, TASKS, "one of https://huggingface.co/tasks"),
        "tags": lambda key, value: _each_text(key, value, alone=False),
        "metrics": _each_text,
        "model_name": _text,
        "inference": _check_inference,
        "datasets": lambda key, value: _check_ids(key, value, "data set"),
        "base_model": lambda key, value: _check_ids(key, value, "model"),
        "base_model_relation": lambda key, value: _one_of(key, value, RELATIONS, " or ".join(RELATIONS)),
        "model-index": _check_index,
        "widget": lambda key, value: _check_widget(key, value, mask_token),
    }
    for key, check in checks.items():
        if key in given:
            check(key, given[key])
    try:
        ModelCardData(**metadata).to_yaml()
    except Exception as error:  # the client raises ValueError, TypeError and others
        raise UserError(f"huggingface_hub refuses the card's metadata: {_line(error)}; mend it") from None


def check_license(identifier: str) -> None:
    """
    Check a licence.

    Raises:
        UserError: the Hub does not have this licence identifier.
    """
    page = "https://huggingface.co/docs/hub/repositories-licenses"
    _one_of("license", identifier, LICENSES, f"one of {page}, or other, with a license_name and a license_link")


def _check_licenses(given):
    mend = "give --license apache-2.0, or write `license: apache-2.0` or another of the Hub's identifiers"
    licenses = _each_text("license", given.get("license", []))
    if not licenses:
        raise UserError(f"license: the card lacks a licence; {mend}")
    for identifier in licenses:
        check_license(identifier)
    if "other" in licenses:
        for key, pattern, mend in (
            ("license_name", LICENSE_NAME, "small letters, digits, - and ., as in my-own-license"),
            ("license_link", LICENSE_LINK, "LICENSE, a file beside the card, or an address"),
        ):
            if key not in given:
                raise UserError(f"license other needs a {key} beside it; write {mend}")
            if not pattern.fullmatch(_text(key, given[key])):
                raise UserError(f"{key} {_shown(given[key])} is not one that the Hub takes; write {mend}")


def _check_languages(key, value):
    for code in _each_text(key, value):
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", code):
            part = re.match(r"([a-z]{2,3})[-_][a-z]", code, re.IGNORECASE)
            mend = "write an ISO 639 code of two or three small letters such as en, or code, or multilingual"
            if part:  # a code with a region or script, for which the card has the key language_bcp47
                mend = f"write {part[1].lower()}, and {code.replace('_', '-')} under language_bcp47"
            raise UserError(f"{key} {_shown(code)} is not one that the Hub takes; {mend}")


def _check_inference(key, value):
    if not isinstance(value, bool | dict):
        raise UserError(f"{key} is {_shown(value)}; write false, or `parameters:` with the parameters below it")


def _check_ids(key, value, kind):
    for name in _each_text(key, value):
        mend = f"remove the entry, or write the {kind}'s id on the Hub, owner/name"
        local = re.match(r"[/~\\]|\.{1,2}([/\\]|$)|[A-Za-z]:[/\\]|file:", name) or "\\" in name
        if local or os.path.exists(name):
            raise UserError(f"{key}: {_shown(name)} is a path on this machine; {mend}")
        if name.lower().endswith(DATA_SUFFIXES):
            raise UserError(f"{key}: {_shown(name)} is the name of a file, not of a {kind} on the Hub; {mend}")
        try:
            if not name.isascii():  # version 1 of the client accepts other letters, the Hub does not
                raise HFValidationError
            validate_repo_id(name)
        except HFValidationError:
            raise UserError(f"{key}: {_shown(name)} cannot be an id on the Hub; {mend}") from None


def _check_index(key, value):
    for i, entry in enumerate(_list(key, value)):
        where = f"{key}[{i}]"
        _fields(where, entry, texts=["name"], others=["results"])
        for j, result in enumerate(_list(f"{where}.results", entry["results"])):
            here = f"{where}.results[{j}]"
            _fields(here, result, others=["task", "dataset", "metrics"])
            _fields(f"{here}.task", result["task"], texts=["type"], optional=["name"])
            options = ["config", "split", "revision"]
            _fields(f"{here}.dataset", result["dataset"], texts=["name", "type"], optional=options)
            if not DATASET_TYPE.fullmatch(result["dataset"]["type"]):
                raise UserError(
                    f"{here}.dataset.type {_shown(result['dataset']['type'])} is not one that the Hub takes; write "
                    "letters, digits, -, _ and . with at most one / between them, and the full name as dataset.name"
                )
            for k, metric in enumerate(_list(f"{here}.metrics", result["metrics"])):
                _check_metric(f"{here}.metrics[{k}]", metric)


def _check_metric(where, metric):
    _fields(where, metric, texts=["type"], optional=["name", "config"], others=["value"])
    value = metric["value"]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not (isinstance(value, str) and value.strip()):
        raise UserError(f"{where}.value is {_shown(value)}; write a finite number or text, or take the metric out")


def _check_widget(key, value, mask_token):
    for i, example in enumerate(_list(key, value)):
        where = f"{key}[{i}]"
        _fields(where, example, texts=["text"] if mask_token else [], optional=["text", "example_title"])
        if mask_token and mask_token not in example["text"]:
            raise UserError(f"{where}.text {_shown(example['text'])} has no {mask_token}; put one into it")
        output = example.get("output", [])
        if isinstance(output, dict):  # the output of other tasks: an answer, a text, the address of an image
            continue
        for j, guess in enumerate(_list(f"{where}.output", output)):
            _fields(f"{where}.output[{j}]", guess, texts=["label"], others=["score"])
            score = guess["score"]
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise UserError(f"{where}.output[{j}].score is {_shown(score)}; write a finite number")


def _fields(where, mapping, texts=(), optional=(), others=()):
    """
    Check the fields of a mapping.

    Args:
        texts: fields that must be there and be text; null is not text.
        optional: fields that must be text if they are there.
        others: fields that must be there, with any value.
    """
    if not isinstance(mapping, dict):
        raise UserError(f"{where} is {_shown(mapping)}; give it as lines of `key: value`")
    for name in (*texts, *others):
        if name not in mapping:
            raise UserError(f"{where} has no {name}; add a line `{name}: ...`")
    for name in (*texts, *optional):
        if name in mapping:
            _text(f"{where}.{name}", mapping[name])


def _list(key, value):
    if not isinstance(value, list):
        raise UserError(f"{key} is {_shown(value)}, not a list; write each on a line of its own that begins with -")
    return value


def _each_text(key, value, alone=True):
    """The texts of a list; if `alone`, a single text instead of a list is allowed."""
    values = [value] if alone and not isinstance(value, list) else _list(key, value)
    return [_text(key, each) for each in values]


def _text(key, value):
    if isinstance(value, str) and value.strip():
        return value
    mend = "write text, or take it out"
    if isinstance(value, bool):
        mend = 'YAML reads no, off, yes and on as that; put it in quotes, as "no" for Norwegian'
    elif isinstance(value, int | float | datetime.date):
        mend = "YAML does not read it as text; put it in quotes"
    raise UserError(f"{key} is {_shown(value)}; {mend}")


def _one_of(key, value, known, choice):
    if _text(key, value) not in known:
        words = re.findall(r"[a-z0-9.+]+", value.lower())
        plain = "-".join(word for word in words if word not in ("the", "license", "licence", "version"))
        near = difflib.get_close_matches(plain, known, n=1)
        raise UserError(f"{key} {_shown(value)} is not one that the Hub knows; write {near[0] if near else choice}")


def _shown(value):
    """A value as Python writes it, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _line(error):
    return " ".join(str(error).split())
