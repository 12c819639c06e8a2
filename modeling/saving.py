"""Saves a model into a folder: weights, config.json, and the code that loads the model without d2l_bert."""

import shutil
from pathlib import Path


# Fields of `D2lBertConfig` that a run with --init_from may change.
FREE_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


# The entry `auto_map` of config.json: the class that each Auto class loads with `trust_remote_code=True`.
AUTO_MAP = {
    "AutoConfig": "configuration_d2l_bert.D2lBertConfig",
    "AutoModel": "modeling_d2l_bert.D2lBertModel",
    "AutoModelForPreTraining": "modeling_d2l_bert.D2lBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_d2l_bert.D2lBertForMaskedLM",
    "AutoModelForNextSentencePrediction": "modeling_d2l_bert.D2lBertForNextSentencePrediction",
    "AutoModelForSequenceClassification": "modeling_d2l_bert.D2lBertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_d2l_bert.D2lBertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_d2l_bert.D2lBertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_d2l_bert.D2lBertForMultipleChoice",
}


def save_with_code(model, folder: Path) -> None:
    """Write a d2l-bert model: the weights, config.json with `auto_map`, and the two Python files of the model."""
    model.config.auto_map = dict(AUTO_MAP)
    save_model(model, folder)


def save_model(model, folder: Path) -> None:
    """Write the weights and config.json of any Transformers model."""
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors writes files that only the owner can read
