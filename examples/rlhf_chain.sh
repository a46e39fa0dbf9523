#!/usr/bin/env bash
# From random weights to PPO with a trained reward model: supervised training on demonstrations, a third of them wrong,
# a reward model from pairs of a better and a worse answer, and PPO against it. About ten minutes on two cores.
#
#   bash examples/rlhf_chain.sh runs/chain --sp-ulysses 2 --sp-ring 2
#
# Arguments after the output directory are passed to all three runs. Environment variables: NPROC, the number of ranks
# (8); SFT_STEPS, REWARD_STEPS and PPO_STEPS.
set -euo pipefail

folder=${1:?usage: rlhf_chain.sh OUTPUT_DIR [rlhf.py flags]}
shift
flags=("$@")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

rlhf() {
    torchrun --standalone --nproc-per-node "${NPROC:-8}" "$root/rlhf.py" "$@" "${flags[@]}"
}

rlhf --algorithm sft --wrong-answers 0.33 --steps "${SFT_STEPS:-150}" --output "$folder/sft"
# The models are tiny, so they keep the rates of the presets.
rlhf --algorithm reward_model --model "$folder/sft/model" --learning-rate 2e-3 --steps "${REWARD_STEPS:-100}" \
    --output "$folder/reward"
rlhf --algorithm ppo --model "$folder/sft/model" --reward-model "$folder/reward/model" \
    --learning-rate 3e-4 --critic-learning-rate 1e-3 --steps "${PPO_STEPS:-60}" --options mini_batches=2 --output "$folder/ppo"
