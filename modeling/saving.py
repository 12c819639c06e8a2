"""A model folder: weights, configuration and the code for readers who have no d2l_bert."""

import shutil
from pathlib import Path


# What a run may change in the architecture of the model that it starts from.
FREE_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


# What `trust_remote_code=True` finds in config.json where d2l_bert is not installed.
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
    """Write weights and configuration of one of our models, and the two files of code that define it."""
    model.config.auto_map = dict(AUTO_MAP)
    save_model(model, folder)


def save_model(model, folder: Path) -> None:
    """Write weights and configuration of any model."""
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors lets only the owner read it
