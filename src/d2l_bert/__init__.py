"""Public names of d2l-bert (raw text in, a BERT out), and the registration with Transformers.

`import d2l_bert` registers the model with Transformers' Auto classes, so that `AutoModelForMaskedLM.from_pretrained`
and `pipeline("fill-mask")` load it. The import also registers the task of `pipeline("next-sentence-prediction")`.
The process of the command `d2l-bert` does so later, when it runs a command: help and versions need no PyTorch.
"""

import functools
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING


__version__ = version("d2l-bert")

if TYPE_CHECKING:  # type checkers do not see what `__getattr__` imports
    from d2l_bert.modeling.configuration_d2l_bert import *  # noqa: F403
    from d2l_bert.modeling.modeling_d2l_bert import *  # noqa: F403
    from d2l_bert.pair_tasks import NextSentencePredictionPipeline as NextSentencePredictionPipeline
    from d2l_bert.pair_tasks import PretrainingLoss as PretrainingLoss
    from d2l_bert.tokenization.wordpiece import train_wordpiece as train_wordpiece
    from d2l_bert.training.config import PretrainConfig as PretrainConfig
    from d2l_bert.training.pretrain import pretrain as pretrain
    from d2l_bert.training.recipes import RECIPES as RECIPES

# The module of each public name. `__getattr__` imports it at the first use, not `import d2l_bert`.
_MODULES = {
    "D2lBertConfig": "modeling.configuration_d2l_bert",
    "D2lBertForMaskedLM": "modeling.modeling_d2l_bert",
    "D2lBertForMultipleChoice": "modeling.modeling_d2l_bert",
    "D2lBertForNextSentencePrediction": "modeling.modeling_d2l_bert",
    "D2lBertForPreTraining": "modeling.modeling_d2l_bert",
    "D2lBertForQuestionAnswering": "modeling.modeling_d2l_bert",
    "D2lBertForSequenceClassification": "modeling.modeling_d2l_bert",
    "D2lBertForTokenClassification": "modeling.modeling_d2l_bert",
    "D2lBertModel": "modeling.modeling_d2l_bert",
    "D2lBertPreTrainedModel": "modeling.modeling_d2l_bert",
    "NextSentencePredictionPipeline": "pair_tasks",
    "PretrainConfig": "training.config",
    "PretrainingLoss": "pair_tasks",
    "RECIPES": "training.recipes",
    "pretrain": "training.pretrain",
    "train_wordpiece": "tokenization.wordpiece",
}

__all__ = list(_MODULES)


def __dir__():
    return sorted({*globals(), *_MODULES})


def __getattr__(name):
    if name in _MODULES:
        return getattr(import_module(f"d2l_bert.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def register_with_transformers() -> None:
    """Make Transformers' Auto classes and `pipeline` know the model, once in a process."""
    import transformers

    from d2l_bert import pair_tasks
    from d2l_bert.modeling import conversion, modeling_d2l_bert

    config_class = modeling_d2l_bert.D2lBertConfig
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    transformers.AutoTokenizer.register(config_class, transformers.BertTokenizer, exist_ok=True)
    for name, place in conversion.AUTO_MAP.items():
        our_class = getattr(modeling_d2l_bert, place.partition(".")[2])
        if our_class is not config_class:
            getattr(transformers, name).register(config_class, our_class, exist_ok=True)
        # `save_pretrained` copies the model's code into the folder, to be loaded with `trust_remote_code=True`.
        our_class.register_for_auto_class(name)
    transformers.pipelines.PIPELINE_REGISTRY.register_pipeline(
        "next-sentence-prediction",
        pipeline_class=pair_tasks.NextSentencePredictionPipeline,
        pt_model=transformers.AutoModelForNextSentencePrediction,
        type="text",
    )


if not sys.argv or os.path.basename(sys.argv[0]) not in ("d2l-bert", "d2l-bert.exe"):
    register_with_transformers()
