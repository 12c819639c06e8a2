"""The licences of the Hub: each is taken; another spelling is refused with the identifier that was meant."""

import pytest

from d2l_bert.errors import UserError
from d2l_bert.model_cards.config import LICENSES, check_license


def test_every_licence_passes_and_none_is_listed_twice():
    assert len(LICENSES) == len(set(LICENSES)) == 83
    for identifier in LICENSES:
        check_license(identifier)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("APACHE_2.0", "apache-2.0"),
        ("CC BY-SA 4.0", "cc-by-sa-4.0"),
        ("proprietary", "one of https://huggingface.co/docs/hub/repositories-licenses"),
        ("", "one of https://huggingface.co/docs/hub/repositories-licenses"),
    ],
)
def test_an_unknown_licence_is_refused_with_what_was_meant(written, meant):
    with pytest.raises(UserError) as refused:
        check_license(written)
    assert str(refused.value) == f"license {written!r} is not one that the Hub knows; write {meant}"
