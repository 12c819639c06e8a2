"""Public names of d2l-bert (raw text in, a BERT out), and the registration with Transformers.

After `import d2l_bert`, Transformers' Auto classes know the model, so that `AutoModelForMaskedLM.from_pretrained` and
`pipeline("fill-mask")` load it, and so does `pipeline("next-sentence-prediction")`. The model is registered as soon as
a program imports Transformers, before or after d2l_bert. A program that does not, such as `d2l-bert --help`, does not
wait for Transformers and PyTorch either. PEFT learns which layers to adapt as soon as a program imports PEFT.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING


__version__ = version("d2l-bert")

if TYPE_CHECKING:  # type checkers do not see what `__getattr__` imports
    from d2l_bert.functions import embed as embed
    from d2l_bert.functions import evaluate as evaluate
    from d2l_bert.functions import export as export
    from d2l_bert.functions import finetune as finetune
    from d2l_bert.functions import predict as predict
    from d2l_bert.functions import prepare as prepare
    from d2l_bert.functions import pretrain as pretrain
    from d2l_bert.functions import publish as publish
    from d2l_bert.functions import score as score
    from d2l_bert.inference.config import EmbedConfig as EmbedConfig
    from d2l_bert.inference.embed import EmbedResult as EmbedResult
    from d2l_bert.messages import UserError as UserError
    from d2l_bert.model_cards.config import PublishConfig as PublishConfig
    from d2l_bert.model_cards.publish import PublishResult as PublishResult
    from d2l_bert.modeling.config import ExportConfig as ExportConfig
    from d2l_bert.modeling.configuration_d2l_bert import *  # noqa: F403
    from d2l_bert.modeling.export import ExportResult as ExportResult
    from d2l_bert.modeling.modeling_d2l_bert import *  # noqa: F403
    from d2l_bert.pair_tasks import NextSentencePredictionPipeline as NextSentencePredictionPipeline
    from d2l_bert.pair_tasks import PretrainingLoss as PretrainingLoss
    from d2l_bert.tokenization.config import TextConfig as TextConfig
    from d2l_bert.tokenization.wordpiece import train_wordpiece as train_wordpiece
    from d2l_bert.training.config import PretrainConfig as PretrainConfig
    from d2l_bert.training.evaluation.config import EvaluateConfig as EvaluateConfig
    from d2l_bert.training.evaluation.evaluate import EvaluateResult as EvaluateResult
    from d2l_bert.training.finetuning.config import FinetuneConfig as FinetuneConfig
    from d2l_bert.training.finetuning.config import PredictConfig as PredictConfig
    from d2l_bert.training.finetuning.config import ScoreConfig as ScoreConfig
    from d2l_bert.training.finetuning.predict import PredictResult as PredictResult
    from d2l_bert.training.finetuning.score import Score as Score
    from d2l_bert.training.finetuning.train import FinetuneResult as FinetuneResult
    from d2l_bert.training.initialize import PrepareResult as PrepareResult
    from d2l_bert.training.pretrain import PretrainResult as PretrainResult
    from d2l_bert.training.recipes import RECIPES as RECIPES

# The module of each public name. `__getattr__` imports it at the first use, not `import d2l_bert`.
_MODULES = {
    "D2lBertConfig": "modeling.configuration_d2l_bert",
    "D2lBertForMaskedLM": "modeling.modeling_d2l_bert",
    "D2lBertForMultipleChoice": "modeling.modeling_d2l_bert",
    "D2lBertForNextSentencePrediction": "modeling.modeling_d2l_bert",
    "D2lBertForPreTraining": "modeling.modeling_d2l_bert",
    "D2lBertForPreTrainingOutput": "modeling.modeling_d2l_bert",
    "D2lBertForQuestionAnswering": "modeling.modeling_d2l_bert",
    "D2lBertForSequenceClassification": "modeling.modeling_d2l_bert",
    "D2lBertForTokenClassification": "modeling.modeling_d2l_bert",
    "D2lBertModel": "modeling.modeling_d2l_bert",
    "D2lBertPreTrainedModel": "modeling.modeling_d2l_bert",
    "EmbedConfig": "inference.config",
    "EmbedResult": "inference.embed",
    "EvaluateConfig": "training.evaluation.config",
    "EvaluateResult": "training.evaluation.evaluate",
    "ExportConfig": "modeling.config",
    "ExportResult": "modeling.export",
    "FinetuneConfig": "training.finetuning.config",
    "FinetuneResult": "training.finetuning.train",
    "NextSentencePredictionPipeline": "pair_tasks",
    "PredictConfig": "training.finetuning.config",
    "PredictResult": "training.finetuning.predict",
    "PrepareResult": "training.initialize",
    "PretrainConfig": "training.config",
    "PretrainResult": "training.pretrain",
    "PretrainingLoss": "pair_tasks",
    "PublishConfig": "model_cards.config",
    "PublishResult": "model_cards.publish",
    "RECIPES": "training.recipes",
    "Score": "training.finetuning.score",
    "ScoreConfig": "training.finetuning.config",
    "TextConfig": "tokenization.config",
    "UserError": "messages",
    "embed": "functions",
    "evaluate": "functions",
    "export": "functions",
    "finetune": "functions",
    "predict": "functions",
    "prepare": "functions",
    "pretrain": "functions",
    "publish": "functions",
    "score": "functions",
    "train_wordpiece": "tokenization.wordpiece",
}

__all__ = list(_MODULES)


def __dir__():
    return sorted({*globals(), *_MODULES})


def __getattr__(name):
    if name in _MODULES:
        return getattr(import_module(f"d2l_bert.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------------------------------
# The registration with Transformers


class Registration:
    """
    Registers the model with a library, once, as soon as the library is imported.

    It stands in `sys.meta_path`, where Python asks for every module that is imported for the first time. It finds
    none itself: it asks the others there, and has `import_module_of` run what they find.

    Registering with Transformers imports modules of this package, so all that are being imported are finished first.
    For example, `import d2l_bert.pair_tasks` imports Transformers in its first lines: the model is registered after
    its last one.

    Attributes:
        library: the module that the model is registered with.
        register_model: what registers it.
        prefixes: with which the names of other modules begin whose import has to end first.
        pending: how many imports, and blocks of `postponed`, are still to end before the model may be registered.
    """

    def __init__(self, library: str, register_model: Callable[[], None], prefixes: tuple[str, ...] = ()):
        self.library = library
        self.register_model = register_model
        self.prefixes = prefixes
        self.pending = 0

    def find_spec(self, name, path=None, target=None):
        """Where a module is, which Python asks at its first import; None to leave that to the other finders."""
        if name != self.library and not name.startswith(self.prefixes):
            return None
        for finder in [*sys.meta_path]:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = functools.partial(self.import_module_of, spec.loader.exec_module)
                return spec
        return None

    def import_module_of(self, exec_module, module):
        """Run the code of a module by `exec_module`, that of its loader; then register the model if it is time."""
        with self.postponed():
            exec_module(module)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Register the model after the block at the earliest; not there if the block raises, as help does to exit."""
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1
        if self.pending == 0 and self.library in sys.modules:
            self.register()

    def register(self) -> None:
        """Register the model now, unless it is registered."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.register_model()


def register_with_transformers() -> None:
    """Make Transformers' Auto classes and `pipeline` know the model."""
    import transformers

    from d2l_bert import pair_tasks
    from d2l_bert.modeling import modeling_d2l_bert

    config_class = modeling_d2l_bert.D2lBertConfig
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    transformers.AutoModelForTextEncoding.register(config_class, modeling_d2l_bert.D2lBertModel, exist_ok=True)
    transformers.AutoTokenizer.register(config_class, transformers.BertTokenizer, exist_ok=True)
    for name, place in modeling_d2l_bert.AUTO_MAP.items():
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


def register_with_peft() -> None:
    """Give PEFT the layers of this model that it adapts in BERT if no `target_modules` are given."""
    our_names = {"output.dense": ["attention.output", "ffn.dense2"]}
    for name, layers_of in vars(sys.modules["peft.utils.constants"]).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "bert" in layers_of:
            layers = []
            for layer in layers_of["bert"]:
                layers += our_names.get(layer, [layer])
            layers_of.setdefault("d2l-bert", layers)


registration = Registration("transformers", register_with_transformers, prefixes=("d2l_bert.",))
peft_registration = Registration("peft", register_with_peft)
sys.meta_path[:0] = [registration, peft_registration]
with registration.postponed(), peft_registration.postponed():
    pass  # registers the model if the libraries are imported already
