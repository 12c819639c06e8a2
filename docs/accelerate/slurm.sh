#!/bin/bash
# Starts one task per GPU, on two machines with four GPUs each. Options after the script go to `d2l-bert pretrain`:
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

export HF_HOME="${HF_HOME:-$SLURM_SUBMIT_DIR/hf}" # a folder that every machine can read and write
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# If the model does not fit on one GPU, uncomment these settings (the same as fsdp2.yaml):
# export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
# export FSDP_TRANSFORMER_CLS_TO_WRAP=D2lBertEncoderBlock

# A task that fails ends the others, which would wait for it. exec replaces the shell by the program, so that signals
# reach the program; a shell would not pass them on.
srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec d2l-bert pretrain "$@"
' task --resume_from_checkpoint latest "$@"
code=$?

# Exit code 143: the time limit was reached and a checkpoint was saved, so queue the job again. Other codes end the job.
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
