"""`longest_input`: a model runs on an input of that many tokens, and fails on an input with one token more."""

from types import SimpleNamespace

import pytest
import torch
from conftest import SIZES
from transformers import AutoConfig, AutoModel

from d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import longest_input


UNLIMITED = SimpleNamespace(model_max_length=int(1e30))
TYPES = ["bert", "distilbert", "albert", "electra", "roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"]


def config_of(model_type, **settings):
    if model_type == "d2l":
        return D2lBertConfig(**{**SIZES, "vocab_size": 50, "max_position_embeddings": 20, **settings})
    names = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "embedding_size": 16, "num_hidden_groups": 1}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **names}
    known = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in sizes.items() if hasattr(known, name)}
    given = {"vocab_size": 50, "max_position_embeddings": 20, "pad_token_id": 3, **sizes, **settings}
    return AutoConfig.for_model(model_type, **given)


@pytest.mark.parametrize("model_type", ["d2l", *TYPES])
def test_a_model_runs_on_the_longest_input_and_on_no_longer_one(model_type):
    config = config_of(model_type)
    model = AutoModel.from_config(config).eval()
    limit = longest_input(model, UNLIMITED)
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(input_ids=torch.full((1, limit + 1), 7))
    with torch.device("meta"):
        assert longest_input(AutoModel.from_config(config), UNLIMITED) == limit
