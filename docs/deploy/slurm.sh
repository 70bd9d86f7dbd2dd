#!/usr/bin/env bash
# Converts a model in PARTS pieces as a Slurm array, then puts them together.
#
#   bash slurm.sh org/model@COMMIT nvfp4 /shared/out/model.rad 16
#
# radpack, the source (or HF_HOME with its cache) and the folder of the output must be the same on all nodes. A node that
# fails is queued again and goes on where its part was; the merge runs once all parts have succeeded.
set -euo pipefail

if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    source=$1 recipe=$2 out=$3 parts=$4
    array=$(sbatch --parsable --job-name=radpack --array="1-$parts" --requeue \
        --cpus-per-task=16 --mem=4G --time=04:00:00 "$0" "$source" "$recipe" "$out" "$parts")
    sbatch --job-name=radpack-merge --dependency="afterok:$array" --cpus-per-task=16 --mem=4G --time=02:00:00 \
        --wrap="radpack merge '$out'.part-*-of-$parts -o '$out' && radpack validate '$out'"
    exit
fi

source=$1 recipe=$2 out=$3 parts=$4
exec radpack convert "$source" --recipe "$recipe" --part "$SLURM_ARRAY_TASK_ID/$parts" --resume -o "$out"
