"""Fine-tuning: a pretrained encoder and a table with labels -> a model for a task, on Transformers' `Trainer`."""
