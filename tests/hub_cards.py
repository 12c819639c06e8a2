"""The checks of a model card's metadata, for which the local Hub refuses an upload."""

import re

import yaml


ID = r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9](?!.*(?:\.\.|--|\.git$))[\w.-]*"
LANGUAGE = r"[a-z]{2,3}(-\w+)*|code|multilingual"

# The metadata that this package writes: a regular expression of a text, a list of one kind, or a dict of kinds.
RESULT = {
    "task": {"type": ".+"},
    "dataset": {"type": ID, "name": ".+"},
    "metrics": [{"type": ".+", "value": object}],
}
RULES = {
    **dict.fromkeys(("license", "library_name", "pipeline_tag", "base_model", "model_name"), ".+"),
    **{"tags": [".+"], "language": [LANGUAGE], "datasets": [ID], "base_model": ID},
    "model-index": [{"name": ".+", "results": [RESULT]}],
}


def read_card(text) -> tuple[dict, list[str]]:
    """A card's metadata, and the errors in it."""
    block = re.match(r"\s*---\n(.*?)\n---\s", text, re.DOTALL)
    try:
        data = yaml.safe_load(block[1]) if block else {}
    except yaml.YAMLError as error:
        return {}, [f"Invalid YAML: {error}"]
    given = data | ({"language": [data["language"]]} if isinstance(data.get("language"), str) else {})  # or a list
    return data, [error for name in RULES.keys() & data.keys() for error in _errors(name, given[name], RULES[name])]


def _errors(place, value, rule):
    """Where a value breaks its rule."""
    if isinstance(rule, list) and isinstance(value, list):
        for number, one in enumerate(value):
            yield from _errors(f"{place}[{number}]", one, rule[0])
    elif isinstance(rule, dict) and isinstance(value, dict):
        for key, one in rule.items():
            yield from _errors(f"{place}.{key}", value.get(key), one)
    elif value is None or (rule is not object and not _matches(value, rule)):
        yield f'"{place}" with value "{value}" is not valid'


def _matches(value, rule):
    return isinstance(value, str) and isinstance(rule, str) and re.fullmatch(rule, value, re.DOTALL)
