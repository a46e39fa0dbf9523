#!/bin/sh
# Train the model of agent.py from random weights, on two ranks: sh examples/agents/train.sh [FLAG ...]
# With python examples/agents/agent.py 8765 & and --agent http://127.0.0.1:8765 one process plays all episodes.
# With --agent= --environment examples/agents/environment.py:Terminal the same task is an environment.
set -e
mkdir -p runs
python -c 'import json
for n in range(64): print(json.dumps({"prompt": [{"role": "user", "content": f"{n % 8}?"}]}))' > runs/questions.jsonl
exec torchrun --nproc-per-node 2 rlhf.py --algorithm grpo --model tiny --sft-steps 0 --data runs/questions.jsonl \
    --chat-template examples/agents/template.jinja --agent "python examples/agents/agent.py" --output runs/agent \
    --stop-ids "$(seq -s, 0 383)" --max-new-tokens 2 --max-turns 2 --prompts 2 --group-size 8 \
    --steps 30 --learning-rate 5e-3 --warmup-steps 2 --options kl=0 "$@"
