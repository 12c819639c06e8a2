"""Public names of d2l-bert (raw text in, a BERT out), and the registration with Transformers.

`import d2l_bert` registers the model with Transformers' Auto classes, so that `AutoModelForMaskedLM.from_pretrained`
and `pipeline("fill-mask")` load it. The import also registers the task of `pipeline("next-sentence-prediction")`.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizer,
)
from transformers.pipelines import PIPELINE_REGISTRY

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import (
    D2lBertForMaskedLM,
    D2lBertForMultipleChoice,
    D2lBertForNextSentencePrediction,
    D2lBertForPreTraining,
    D2lBertForQuestionAnswering,
    D2lBertForSequenceClassification,
    D2lBertForTokenClassification,
    D2lBertModel,
    D2lBertPreTrainedModel,
)
from d2l_bert.next_sentence_pipeline import NextSentencePredictionPipeline


AutoConfig.register(D2lBertConfig.model_type, D2lBertConfig, exist_ok=True)
AutoTokenizer.register(D2lBertConfig, BertTokenizer, exist_ok=True)
for auto_class, model_class in (
    (AutoModel, D2lBertModel),
    (AutoModelForPreTraining, D2lBertForPreTraining),
    (AutoModelForMaskedLM, D2lBertForMaskedLM),
    (AutoModelForNextSentencePrediction, D2lBertForNextSentencePrediction),
    (AutoModelForSequenceClassification, D2lBertForSequenceClassification),
    (AutoModelForTokenClassification, D2lBertForTokenClassification),
    (AutoModelForQuestionAnswering, D2lBertForQuestionAnswering),
    (AutoModelForMultipleChoice, D2lBertForMultipleChoice),
):
    auto_class.register(D2lBertConfig, model_class, exist_ok=True)
    # `save_pretrained` copies the model's code into the folder, to be loaded with `trust_remote_code=True`.
    model_class.register_for_auto_class(auto_class.__name__)
D2lBertConfig.register_for_auto_class()

PIPELINE_REGISTRY.register_pipeline(
    "next-sentence-prediction",
    pipeline_class=NextSentencePredictionPipeline,
    pt_model=AutoModelForNextSentencePrediction,
    type="text",
)

__version__ = version("d2l-bert")

if TYPE_CHECKING:  # type checkers do not see what `__getattr__` imports
    from d2l_bert.tokenization.wordpiece import train_wordpiece as train_wordpiece
    from d2l_bert.training.config import PretrainConfig as PretrainConfig
    from d2l_bert.training.pretrain import pretrain as pretrain
    from d2l_bert.training.recipes import RECIPES as RECIPES
    from d2l_bert.training.trainer_loss import PretrainingLoss as PretrainingLoss

# Public names that only training needs: `__getattr__` imports their modules at the first use, not `import d2l_bert`.
_LAZY_IMPORTS = {
    "PretrainConfig": "d2l_bert.training.config",
    "PretrainingLoss": "d2l_bert.training.trainer_loss",
    "RECIPES": "d2l_bert.training.recipes",
    "pretrain": "d2l_bert.training.pretrain",
    "train_wordpiece": "d2l_bert.tokenization.wordpiece",
}

__all__ = [
    "D2lBertConfig",
    "D2lBertForMaskedLM",
    "D2lBertForMultipleChoice",
    "D2lBertForNextSentencePrediction",
    "D2lBertForPreTraining",
    "D2lBertForQuestionAnswering",
    "D2lBertForSequenceClassification",
    "D2lBertForTokenClassification",
    "D2lBertModel",
    "D2lBertPreTrainedModel",
    "NextSentencePredictionPipeline",
    *_LAZY_IMPORTS,
]


def __dir__():
    return sorted({*globals(), *_LAZY_IMPORTS})


def __getattr__(name):
    if name in _LAZY_IMPORTS:
        return getattr(import_module(_LAZY_IMPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
