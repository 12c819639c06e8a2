#!/bin/bash
# One task for each GPU, on two machines of four. Options behind the script's name go to `d2l-bert pretrain`:
#   sbatch docs/accelerate/slurm.sh --corpus tokens --output_dir my-bert --recipe base --max_steps 100000
#SBATCH --job-name=d2l-bert
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

export HF_HOME="${HF_HOME:-$SLURM_SUBMIT_DIR/hf}" # every machine has to see it
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# For a model that does not fit (the same as fsdp2.yaml):
# export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
# export FSDP_TRANSFORMER_CLS_TO_WRAP=D2lBertEncoderBlock

# exec: the signal reaches the program itself, and not a shell that would not pass it on.
srun --cpus-per-task="$OMP_NUM_THREADS" bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec d2l-bert pretrain "$@"
' task --resume_from_checkpoint latest "$@"
code=$?

# 143: time was up, and a checkpoint is there. Any other code ends the job.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
