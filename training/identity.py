"""The identity of a run: options and fingerprints that a checkpoint and the run that resumes from it must share."""

import dataclasses
import json

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS
from d2l_bert.tokenization.prepare import PreparedText, split_fingerprint
from d2l_bert.training import epochs
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.run_folder import architecture_numbers


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """The values that a checkpoint and the run that resumes from it must share, by the names in error messages."""
    # The tokenizer's fingerprint covers these. With an existing tokenizer the training options have no effect.
    redundant = {"pad_token_id", *(TOKENIZER_TRAINING_OPTIONS if run.existing_tokenizer() else ())}
    # `check_identity` names the first difference, so the cause comes before its effect: a tokenizer trained by this
    # run follows from the corpus; with an existing tokenizer, the corpus's tokens follow from the tokenizer.
    fingerprints = {
        "corpus (fingerprint)": text.tokens.fingerprint(),
        "tokenizer (fingerprint)": wordpiece.fingerprint(text.tokenizer),
    }
    validation = text.validation and text.validation.tokens.fingerprint()
    values = {
        "data order (version)": epochs.DATA_ORDER,
        **architecture_numbers(architecture),
        **run.identity(),
        # A run that holds nothing out trains its tokenizer on the whole text: this is the cause of other fingerprints.
        "validation text": "none" if validation is None else "given",
        **(fingerprints if run.existing_tokenizer() is None else dict(reversed(fingerprints.items()))),
        "validation text (fingerprint)": validation,
        "held-out documents (fingerprint)": split_fingerprint(text),
    }
    return {name: value for name, value in values.items() if name not in redundant}


def check_identity(checkpoint: Checkpoint, identity: dict) -> None:
    """
    Refuse to resume from a checkpoint of another run.

    Args:
        identity: what `make_identity` returned for the run that resumes.

    Raises:
        UserError: the checkpoint has another identity; the message names the first difference.
    """
    saved = checkpoint.state["identity"]
    options = {field.name: field.default for field in dataclasses.fields(PretrainConfig)}
    for name, value in json.loads(json.dumps(identity)).items():
        if name not in saved and name in options and value == options[name]:
            continue  # an option of a later version, whose default does what the earlier version did
        if name not in saved:
            raise UserError(
                f"{checkpoint.path}: a checkpoint of an earlier version of d2l-bert, which has no {name}: the run "
                f"would go on with other pairs; go on with that version, or start a new run in another output_dir"
            )
        if saved[name] != value:
            mend = "or start a new run in another output_dir"
            if name in LENGTH_OPTIONS:  # the schedule of the learning rate depends on the length
                mend += f", from these weights by --init_from {checkpoint.path}"
            raise UserError(
                f"{checkpoint.path}: a checkpoint of another run: {name} was {saved[name]!r}, and is {value!r} now; "
                f"go on with what it was, {mend}"
            )
