#!/bin/bash
# Prepares each shard of a text as a part of one corpus, a task for each shard: shards/0 to shards/99 here. All parts need
# one tokenizer: a folder of `d2l-bert prepare`, made of the first shard for example, or a name on the Hub.
#   d2l-bert prepare --corpus shards/0 --output_dir tokenizer
#   sbatch --array=0-99 docs/accelerate/slurm_prepare.sh --tokenizer tokenizer
#   d2l-bert prepare --check parts/*
#   sbatch docs/accelerate/slurm.sh --corpus parts/* --output_dir my-bert --recipe base --max_steps 100000
# Options after the script go to `d2l-bert prepare`, and must be the same for all parts.
#SBATCH --job-name=d2l-bert-prepare
#SBATCH --array=0-99
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00

part="parts/$SLURM_ARRAY_TASK_ID"
export HF_HOME="${HF_HOME:-$SLURM_SUBMIT_DIR/hf}" # the cache, which all tasks share

# A part that is there is whole, as it appears when all of it is written: a repeated job makes the missing parts only.
if [ -e "$part" ]; then
    echo "$part is there already"
    exit 0
fi
d2l-bert prepare --corpus "shards/$SLURM_ARRAY_TASK_ID" --output_dir "$part" \
    --preprocessing_num_workers "${SLURM_CPUS_PER_TASK:-1}" "$@"
