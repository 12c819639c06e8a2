"""The card of a dataset, which may be a stranger's: checked before the library `datasets` follows it."""

import os
import re
from pathlib import Path, PurePosixPath

import yaml

from d2l_bert.hub_metadata import check_card, check_yaml
from d2l_bert.records import refuse_link_outwards, values_in


# Bytes; cards of data sets with hundreds of configurations have some 100,000.
LARGEST_CARD = 1 << 22

# The time to match a name by a pattern grows with its length to the power of the stars in it.
MOST_STARS = 4

# Options of the library's readers that a configuration of a card may set, beside `data_files`, `data_dir` and
# `features`. Others that a reader has, such as pandas' `read_csv`, may be regular expressions, or sizes of the memory.
ONE_CHARACTER = ("sep", "delimiter", "quotechar", "escapechar", "comment", "decimal", "thousands", "lineterminator")
YES_OR_NO = (
    "default",
    "keep_default_na",
    "na_filter",
    "skipinitialspace",
    "skip_blank_lines",
    "doublequote",
    "keep_linebreaks",
    "drop_labels",
    "drop_metadata",
)
WHOLE_NUMBERS = ("header", "skiprows", "nrows", "quoting")
NAMES = ("names", "column_names", "usecols", "columns")
TEXTS = ("config_name", "description", "version", "field", "sample_by", "encoding", "encoding_errors", "on_bad_lines")


def check_dataset(name: str) -> None:
    """
    Refuse a dataset whose card would make the library read files of this machine, or work without end.

    The library follows patterns of names and reads files as a card says before it tells what it has found.

    Args:
        name: a folder of data files, or an id on the Hub.

    Raises:
        ValueError: the card names a file of this machine, or, in a folder, an address; it sets an option of a reader
            that is not known to be harmless; it numbers classes with gaps; or it cannot be read.
        UserError: a link leads out of the folder to another folder.
    """
    is_folder = Path(name).is_dir()
    if is_folder:
        for place, names, _ in os.walk(name):
            for below in names:
                refuse_link_outwards(Path(place, below), Path(name))
    for card in _cards(name):
        if not isinstance(card, dict):
            continue
        configurations = card.get("configs") or []
        for configuration in configurations if isinstance(configurations, list) else [configurations]:
            _check_configuration(configuration, is_folder)
        _check_classes(card.get("dataset_info"))


def _cards(name):
    """The metadata of the card of a dataset, which may be in two files."""
    from datasets import config
    from huggingface_hub import DatasetCard, hf_hub_download

    for of_card in (config.REPOCARD_FILENAME, config.REPOYAML_FILENAME):
        file = Path(name, of_card)
        if not Path(name).is_dir():
            try:
                file = Path(hf_hub_download(name, of_card, repo_type="dataset"))
            except Exception:  # there is none, or no such dataset, or no network, as the library then says
                continue
        if not file.exists():
            continue
        if not file.is_file():
            raise ValueError(f"{of_card} is no regular file")
        if file.stat().st_size > LARGEST_CARD:
            raise ValueError(f"{of_card} has more than {LARGEST_CARD:,} bytes")
        content = file.read_text(encoding="utf-8-sig")
        if of_card == config.REPOCARD_FILENAME:
            check_card(content)
            yield DatasetCard(content, ignore_metadata_errors=True).data.to_dict()
        else:
            check_yaml(content)
            yield yaml.safe_load(content)


def _check_configuration(configuration, is_of_folder):
    """Refuse what a configuration of a card must not say."""
    if not isinstance(configuration, dict):
        raise ValueError(f"its card has the configuration {configuration!r:.100}, which is no object")
    for option, value in configuration.items():
        if option in ("data_files", "data_dir"):
            _check_paths(value, is_of_folder)
        elif option == "features":
            _check_classes(value)
        elif not _is_harmless(option, value) and _is_of_a_reader(option):
            raise ValueError(
                f"its card has the option {option!r:.50} with {value!r:.50}, which is not passed on to the reader of "
                f"its files; take it out (a separator has one character)"
            )


def _is_of_a_reader(option):
    """Whether one of the library's readers has an option of this name: the library ignores entries that none has."""
    from datasets import load, packaged_modules

    readers = [load.import_main_class(module) for module, _ in packaged_modules._PACKAGED_DATASETS_MODULES.values()]
    return any(hasattr(reader.BUILDER_CONFIG_CLASS, str(option)) for reader in readers)


def _is_harmless(option, value):
    """Whether an option of a reader is known, and has a plain value that it may have."""
    if option in ONE_CHARACTER:
        return isinstance(value, str) and (len(value) == 1 or value == r"\t")
    if option in YES_OR_NO:
        return isinstance(value, bool)
    if option in WHOLE_NUMBERS:
        return value is None or type(value) is int or (option == "header" and value == "infer")
    if option in NAMES:
        return isinstance(value, list) and all(isinstance(name, str | int) for name in value)
    if option == "encoding":
        return isinstance(value, str) and re.match(
            "utf|ascii|latin|iso|cp|windows|gb|big5|euc|koi", value, re.IGNORECASE
        )
    return option in TEXTS and isinstance(value, str | int | float)


def _check_paths(value, is_of_folder):
    """Refuse a path, in a text, a list or a dict, that has many stars, or leads out of the dataset."""
    for part in values_in(value):
        if not isinstance(part, str):
            continue
        if re.search(r"(^|::)(/|file:|local:)", part) or ".." in PurePosixPath(part).parts:
            raise ValueError(f"its card names {part:.200}, a file of this machine")
        if is_of_folder and re.search(r"[:\\\0]", part):  # an address
            raise ValueError(f"its card names {part:.200}, which is not in the folder")
        if len(re.findall(r"\*+", part)) > MOST_STARS:
            raise ValueError(f"its card names {part:.200}, a pattern of more than {MOST_STARS} stars")


def _check_classes(features):
    """
    Refuse classes whose numbers leave out some, anywhere in the features of a card.

    The library makes a list of as many numbers as the largest one says, before it sees that names are missing.
    """
    for part in values_in(features):
        names = part.get("names") if isinstance(part, dict) else None
        if isinstance(names, dict) and sorted(map(int, names)) != list(range(len(names))):
            raise ValueError(f"its card has classes that are not numbered 0, 1, 2 and so on: {list(names)!s:.100}")
