"""The tasks by their names."""

from d2l_bert.training.finetuning import multiple_choice, question_answering, text_classification, token_classification


# A line for each name in `config.TASKS`.
CLASSES = {
    "text-classification": text_classification.TextClassification,
    "multi_label_classification": text_classification.MultiLabelClassification,
    "regression": text_classification.Regression,
    "token-classification": token_classification.TokenClassification,
    "question-answering": question_answering.QuestionAnswering,
    "multiple-choice": multiple_choice.MultipleChoice,
}
