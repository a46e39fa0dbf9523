"""The file of model presets: whose figures they are, and the tokens of those that train on bytes."""

from __future__ import annotations

import json
from pathlib import Path

import usp.presets
from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB
from usp.presets import PRESETS


def test_every_preset_names_its_source_or_trains_on_bytes() -> None:
    stated = json.loads(Path(usp.presets.__file__).with_name("presets.json").read_text())
    assert list(stated) == list(PRESETS)
    for name, preset in PRESETS.items():
        if name.endswith("tiny"):
            tokens = preset.options["vocab_size"], preset.options["eos_token_id"], preset.options["pad_token_id"]
            assert tokens == (BYTE_VOCAB, BYTE_EOS, 0), name
            assert stated[name].keys() == {"model_type", "options"}
        else:
            assert stated[name]["source"].count("/") == 1, name
