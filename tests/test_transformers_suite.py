"""Transformers' own common model tests, on our eight classes.

The tests are in Transformers' source distribution but not in its wheel. `make contract` downloads the source
distribution and runs this file.
"""

import os
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import d2l_bert


FOLDER = os.environ.get("TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("TRANSFORMERS_TESTS does not name the tests of a source distribution", allow_module_level=True)

HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForNextSentencePrediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
}
BATCH = 13
TOKENS = 7


def import_suite():
    """Import the two test modules as parts of a made-up package; modules that the distribution lacks are empty."""

    def module(name, **content):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(FOLDER).resolve())]
        vars(sys.modules[name]).update(content)

    module("suite")
    for package in ("exporters", "generation", "utils"):
        module(f"suite.{package}")
    module("suite.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    module("suite.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    module("suite.utils.test_configuration_utils", config_common_kwargs={})
    transformers.utils.direct_transformers_import = lambda path: transformers
    from suite.test_configuration_common import ConfigTester
    from suite.test_modeling_common import ModelTesterMixin

    return ModelTesterMixin, ConfigTester


ModelTesterMixin, ConfigTester = import_suite()
for head, mapping in HEADS.items():  # the suite looks up here which labels a class takes
    getattr(modeling_auto, mapping)["d2l-bert"] = f"D2lBert{head}"


class ModelTester:
    """The sizes and inputs that Transformers uses to test stock BERT."""

    is_training = True
    batch_size = BATCH
    seq_length = TOKENS
    encoder_seq_length = TOKENS
    key_length = TOKENS
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    vocab_size = 99
    num_choices = 4

    def __init__(self, config_class, switches):
        self.config_class = config_class
        self.switches = switches

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            max_position_embeddings=512,
            type_vocab_size=16,
            **self.switches,
        )

    def prepare_config_and_inputs_for_common(self):
        mask = torch.randint(0, 2, (BATCH, TOKENS))
        mask[:, 0] = 1
        return self.get_config(), {
            "input_ids": torch.randint(0, self.vocab_size, (BATCH, TOKENS)),
            "token_type_ids": torch.randint(0, 16, (BATCH, TOKENS)),
            "attention_mask": mask,
        }


class CommonTests(ModelTesterMixin):
    switches = {}
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(self.config_class, self.switches)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            inputs["labels"] = torch.zeros(BATCH, TOKENS, dtype=torch.long)
            inputs["next_sentence_label"] = torch.zeros(BATCH, dtype=torch.long)
        return inputs

    def test_config(self):
        ConfigTester(self, config_class=self.config_class, hidden_size=32).run_common_tests()


class BookSettingTest(CommonTests, unittest.TestCase):
    config_class = d2l_bert.D2lBertConfig
    all_model_classes = tuple(getattr(d2l_bert, f"D2lBert{head}") for head in HEADS)


class BertSettingTest(CommonTests, unittest.TestCase):
    config_class = d2l_bert.D2lBertConfig
    switches = {"embedding_layer_norm": True, "tie_word_embeddings": True}
    all_model_classes = tuple(getattr(d2l_bert, f"D2lBert{head}") for head in HEADS)
