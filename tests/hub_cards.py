"""The checks of a model card's metadata, for which the local Hub refuses an upload."""

import json
import re

import yaml


def read_card(text) -> tuple[dict, list[str], list[str]]:
    """A card's metadata, the errors in it, and the warnings about it."""
    block = re.match(r"\s*---(?:\r\n|\r|\n)([\S\s]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)", text)
    if block is None:
        return {}, [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return {}, [f"Invalid YAML: {error}"], []
    if not isinstance(data, dict):
        return {}, [f"The metadata must be an object, not {data!r}"], []
    return json.loads(json.dumps(data, default=str)), [*_card_errors(data)], []


TEXTS = ("license", "license_name", "license_link", "library_name", "pipeline_tag")
RESULT = {"task": {"type": str}, "dataset": {"type": str, "name": str}, "metrics": [{"type": str, "value": object}]}


def _card_errors(data):
    """Errors by the Hub's rules, in the Hub's words, for the metadata that this package writes."""
    for name in TEXTS:
        if name in data:
            yield from _mismatches(name, data[name], str)
    for place, tag in enumerate(listed(data, "tags")):
        yield from _mismatches(f"tags[{place}]", tag, str)
    for place, name in enumerate(listed(data, "language")):
        if not isinstance(name, str) or not re.fullmatch(r"[a-z]{2,3}(-\w+)*|code|multilingual", name):
            yield f'"language[{place}]" with value "{name}" is not valid. It must be an ISO 639-1, 639-2 or 639-3 code'
    for key, kind in (("datasets", "dataset"), ("base_model", "model")):
        for place, name in enumerate(listed(data, key)):
            if not _is_id(name):
                yield f'"{key}[{place}]" with value "{name}" is not valid. Use a {kind} id from https://hf.co/{kind}s.'
    if "model-index" in data:
        yield from _mismatches("model-index", data["model-index"], [{"name": str, "results": [RESULT]}])


def _mismatches(place, value, expected):
    """Where a value differs from the expected type: a type, a list of one type, or a dict of types."""
    if value is None:
        yield f'"{place}" is required'
    elif isinstance(expected, list) and isinstance(value, list):
        for number, one in enumerate(value):
            yield from _mismatches(f"{place}[{number}]", one, expected[0])
    elif isinstance(expected, dict) and isinstance(value, dict):
        for key, one in expected.items():
            yield from _mismatches(f"{place}.{key}", value.get(key), one)
        if place.endswith(".dataset") and isinstance(value.get("type"), str) and not _is_id(value["type"]):
            yield f'"{place}.type" with value "{value["type"]}" fails to match the required pattern'
    elif isinstance(expected, list | dict) or not isinstance(value, expected):
        name = "a string" if expected is str else "an array" if isinstance(expected, list) else "an object"
        yield f'"{place}" must be {name}'


def listed(data, name):
    """The value as a list: a card may give one value or several."""
    value = data.get(name, [])
    return value if isinstance(value, list) else [value]


def _is_id(name):
    pattern = r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*"
    return isinstance(name, str) and bool(re.fullmatch(pattern, name)) and not re.search(r"\.\.|--|\.git$", name)
