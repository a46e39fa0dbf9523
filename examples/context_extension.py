"""Pretrain a tiny model on short sequences, extend its context with YaRN, and see at which lengths it finds a needle.

    python examples/context_extension.py runs/extension

Takes a few minutes on two cores. The texts are simple facts with a pass key in between, so a model of two layers learns
to look the key up. Everything below the output directory:

    data/                   texts for training and evaluation
    start/                  the model with random weights, and a tokenizer of whole words
    short/, long/           the runs: on 64 tokens, and from there on 256 with --rope-scaling yarn
    short.png, long.png     the needles that each of the two models finds
    yarn.png                those that the short model finds with YaRN, without training
    loss-by-position.png    held-out loss while the context is extended
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG = 64, 256
LENGTHS = "32,64,96,128,192,256,384"
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


def start(*command: str | Path) -> None:
    """Run a program of this repository."""
    print(f"\n$ python {' '.join(map(str, command))}", flush=True)
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT)


def train(folder: Path, model: Path, seq_len: int, batch_size: int, steps: int, rate: str, *flags: str) -> None:
    data = folder.parent / "data"
    data_flags = ("--data", data / f"train-{seq_len}.jsonl", "--data-cache", data / "cache")
    shape = ("--seq-len", str(seq_len), "--batch-size", str(batch_size), "--steps", str(steps))
    schedule = ("--lr-schedule", "wsd", "--lr-decay-steps", str(max(1, steps // 3)), "--warmup-steps", str(steps // 10))
    rates = ("--learning-rate", rate, *schedule)
    start("train.py", "--model", model, "--output", folder, *data_flags, *shape, *rates, *flags)


def needle(model: Path, data: Path, out: Path, *flags: str) -> None:
    texts = ("--needle", NEEDLE, "--question", QUESTION, "--key-digits", str(DIGITS), "--data", data)
    cells = ("--lengths", LENGTHS, "--depths", "0,25,50,75,100", "--samples", "20", "--max-new-tokens", "1")
    start("-m", "usp", "needle", model, "--out", out, *texts, *cells, "--no-logprobs", *flags)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output directory, which must not exist")
    parser.add_argument("--steps", type=int, default=300, help="of pretraining; the extension has a fifth")
    asked = parser.parse_args(argv)
    folder = asked.folder.resolve()
    data = folder / "data"
    data.mkdir(parents=True)
    haystack = data / "haystack.txt"
    haystack.write_text(" ".join(random.Random(0).choices(FACTS, k=500)))
    for seq_len in (SHORT, LONG):
        write_texts(data / f"train-{seq_len}.jsonl", 32 * asked.steps * SHORT // seq_len, seq_len, seed=seq_len)
    write_texts(data / "held-out.jsonl", 50, LONG, seed=0)
    write_start(folder / "start")

    train(folder / "short", folder / "start", SHORT, 32, asked.steps, "3e-3")
    short = folder / "short" / "model"
    needle(short, haystack, folder / "short.png", "--beyond-limit", "--mark", str(SHORT))
    needle(short, haystack, folder / "yarn.png", "--rope-scaling", "yarn", "--mark", str(SHORT))

    evaluated = ("--eval-data", str(data / "held-out.jsonl"), "--eval-every", "1", "--rope-scaling", "yarn")
    train(folder / "long", short, LONG, 8, max(1, asked.steps // 5), "1e-3", *evaluated)
    needle(folder / "long" / "model", haystack, folder / "long.png", "--beyond-limit", "--mark", str(LONG))
    start("-m", "usp", "loss-by-position", folder / "long", "--out", folder / "loss-by-position.png")


if __name__ == "__main__":
    main(sys.argv[1:])
