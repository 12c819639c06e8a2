"""What a checkpoint must have in common with the run that goes on from it."""

import json

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS
from d2l_bert.tokenization.prepare import PreparedText, split_fingerprint
from d2l_bert.training import data
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.run_folder import architecture_numbers


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """What a checkpoint must have in common with the run that goes on from it."""
    # What the tokenizer settles is compared with it: all but how it was trained, if that was here.
    of_tokenizer = {"pad_token_id", *(TOKENIZER_TRAINING_OPTIONS if run.existing_tokenizer() else ())}
    # The cause is named first: another text makes another tokenizer if it is trained here, and any other makes other
    # tokens.
    of_text = {
        "corpus (fingerprint)": text.tokens.fingerprint(),
        "tokenizer (fingerprint)": wordpiece.fingerprint(text.tokenizer),
    }
    numbers = {
        "data order (version)": data.DATA_ORDER,
        **architecture_numbers(architecture),
        **run.identity(),
        **(of_text if run.existing_tokenizer() is None else dict(reversed(of_text.items()))),
        "held-out documents (fingerprint)": split_fingerprint(text),
    }
    return {name: number for name, number in numbers.items() if name not in of_tokenizer}


def check_identity(found: Checkpoint, identity: dict) -> None:
    """
    Refuse a checkpoint of another run.

    Raises:
        UserError: names the first difference.
    """
    saved = found.state["identity"]
    for name, value in json.loads(json.dumps(identity)).items():
        if name not in saved:
            raise UserError(
                f"{found.path}: a checkpoint of an earlier version of d2l-bert, which has no {name}: it would go on "
                f"with other pairs; go on with that version, or start a run of its own in another output_dir"
            )
        if saved[name] != value:
            raise UserError(
                f"{found.path}: a checkpoint of another run: {name} was {saved[name]!r}, and is {value!r} now; go on "
                f"with what it was, or start a run of its own in another output_dir"
            )
