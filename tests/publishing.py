"""What a Hub received, and changes to a model folder."""

import json


def published(hub, repo_id="someone/bert", revision="main"):
    """The files of a repository, without those that the Hub adds to every repository."""
    files = hub.files(repo_id, revision)
    return {name: content for name, content in files.items() if name != ".gitattributes"}


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_card(folder, old, new):
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new, 1))
