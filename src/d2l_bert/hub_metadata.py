"""Metadata in YAML, of the Hub's cards: checked before a library reads them."""

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK


def check_card(card: str) -> None:
    """
    `check_yaml` for the metadata of a card, found as the Hub's library finds them.

    Args:
        card: the content of a README.md.
    """
    metadata = REGEX_YAML_BLOCK.search(card)
    if metadata:
        check_yaml(metadata[2])


def check_yaml(text: str) -> None:
    """
    Refuse YAML that holds references (aliases): a few lines of them stand for gigabytes.

    Raises:
        ValueError: it does, or it is no YAML.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, where it is installed, is ten times faster
    try:
        for token in yaml.scan(text, Loader=loader):
            if isinstance(token, yaml.AliasToken):
                raise ValueError(f"the metadata hold the reference *{token.value:.50}; write the values")
    except yaml.YAMLError as error:
        raise ValueError(f"the metadata are no YAML: {error}") from None
