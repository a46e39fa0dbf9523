"""Pretrain a tiny model on short sequences, extend its context with YaRN, and see at which lengths it finds a needle.

    python examples/context_extension.py runs/extension

Takes about a minute on two cores. With --ranks 2, two processes extend the context: the first stage divides the batch
over them, the second one the sequences. The texts are simple facts with a pass key in between, so a model of two layers
learns to look the key up. Everything below the output directory:

    data/                   texts for training and evaluation
    start/                  the model with random weights, and a tokenizer of whole words
    curriculum.yaml         the stages of the extension: sequences of 128 tokens, then of 256
    short/, long/           the runs: on 64 tokens, and from there over these stages with --rope-scaling yarn
    short.png, long.png     the needles that each of the two models finds
    yarn.png                those that the short model finds with YaRN, without training
    loss-by-position.png    held-out loss while the context is extended
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SHORT, MIDDLE, LONG = 64, 128, 256
STEP_TOKENS = 2048
LENGTHS = "32,64,96,128,192,256,384,512"
FACTS = (
    "the grass is green .",
    "the sky above us is blue .",
    "snow falls .",
    "here we go and there we come back .",
    "a cat sleeps in the sun .",
    "birds sing in spring .",
    "rivers run to the sea .",
)
NEEDLE, QUESTION, DIGITS = "pass key {key} .", "pass key", 2


def write_texts(file: Path, number: int, tokens: int, seed: int) -> None:
    """Write texts of `tokens` words with several mentions of one pass key, the last at the end."""
    random_ = random.Random(seed)
    with file.open("w") as out:
        for _ in range(number):
            needle = NEEDLE.format(key=random_.randrange(10 ** (DIGITS - 1), 10**DIGITS))
            mentions = [needle] * random_.choice((4, 6, 8))
            room = tokens - 4 * len(mentions) - 4  # 4: words of the needle; and as many of the last mention and EOS
            hay: list[str] = []
            while room > 0:
                words = random_.choice(FACTS).split()[:room]
                hay.append(" ".join(words))
                room -= len(words)
            for mention in mentions:
                hay.insert(random_.randrange(len(hay) + 1), mention)
            out.write(json.dumps({"text": " ".join((*hay, needle.removesuffix(" .")))}) + "\n")


def write_start(folder: Path) -> None:
    """Write a model with random weights whose limit is SHORT tokens, and its tokenizer."""
    keys = [str(key) for key in range(10 ** (DIGITS - 1), 10**DIGITS)]
    words = ["<eos>", "<unk>", *sorted({word for text in (*FACTS, QUESTION) for word in text.split()}), *keys]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SHORT,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_curriculum(file: Path, data: Path, steps: int, ranks: int) -> None:
    """Write two stages of `steps` each, with the same number of tokens in a step: the ranks divide the batch of the
    first, and the sequences of the second."""
    stages = [
        {
            "steps": steps,
            "seq_len": seq_len,
            "data": str(data / f"train-{seq_len}.jsonl"),
            "global_batch_size": STEP_TOKENS // seq_len,
            "sp_ulysses": ulysses,
        }
        for seq_len, ulysses in ((MIDDLE, 1), (LONG, ranks))
    ]
    file.write_text(yaml.safe_dump(stages, sort_keys=False))


def start(*command: str | int | Path, ranks: int = 1) -> None:
    """Run a program of this repository, on several ranks under torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    words = [str(word) for word in (*(torchrun if ranks > 1 else ()), *command)]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT)


def train(folder: Path, model: Path, *flags: str | int | Path, ranks: int = 1) -> None:
    cache = folder.parent / "data" / "cache"
    start("train.py", "--model", model, "--output", folder, "--data-cache", cache, *flags, ranks=ranks)


def needle(model: Path, data: Path, out: Path, *flags: str | int) -> None:
    texts = ("--needle", NEEDLE, "--question", QUESTION, "--key-digits", DIGITS, "--data", data)
    cells = ("--lengths", LENGTHS, "--depths", "0,25,50,75,100", "--samples", 20, "--max-new-tokens", 1)
    start("-m", "examples.needle", model, "--out", out, *texts, *cells, "--no-logprobs", *flags)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output directory, which must not exist")
    parser.add_argument("--steps", type=int, default=300, help="of pretraining; a stage of the extension has a tenth")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4), help="processes of the extension")
    asked = parser.parse_args(argv)
    folder = asked.folder.resolve()
    data = folder / "data"
    folder.mkdir(parents=True)
    data.mkdir()
    haystack = data / "haystack.txt"
    haystack.write_text(" ".join(random.Random(0).choices(FACTS, k=500)))
    for seq_len in (SHORT, MIDDLE, LONG):
        write_texts(data / f"train-{seq_len}.jsonl", STEP_TOKENS * asked.steps // seq_len, seq_len, seed=seq_len)
    write_texts(data / "held-out.jsonl", 20, LONG, seed=0)
    write_start(folder / "start")
    stage_steps = max(1, asked.steps // 10)
    write_curriculum(folder / "curriculum.yaml", data, stage_steps, asked.ranks)

    batches = ("--data", data / f"train-{SHORT}.jsonl", "--seq-len", SHORT, "--batch-size", STEP_TOKENS // SHORT)
    decay = ("--lr-schedule", "wsd", "--lr-decay-steps", max(1, asked.steps // 3))
    rates = ("--learning-rate", "3e-3", "--warmup-steps", asked.steps // 10, *decay)
    train(folder / "short", folder / "start", *batches, "--steps", asked.steps, *rates)
    short = folder / "short" / "model"
    needle(short, haystack, folder / "short.png", "--beyond-limit", "--mark", SHORT)
    needle(short, haystack, folder / "yarn.png", "--rope-scaling", "yarn", "--mark", SHORT)

    extension = ("--curriculum", folder / "curriculum.yaml", "--rope-scaling", "yarn")
    rates = ("--learning-rate", "1e-3", "--warmup-steps", stage_steps // 3)
    evaluation = ("--eval-data", data / "held-out.jsonl", "--eval-every", 1)
    train(folder / "long", short, *extension, *rates, *evaluation, ranks=asked.ranks)
    needle(folder / "long" / "model", haystack, folder / "long.png", "--beyond-limit", "--mark", LONG)
    start("examples/loss_by_position.py", folder / "long", "--out", folder / "loss-by-position.png")


if __name__ == "__main__":
    main(sys.argv[1:])
