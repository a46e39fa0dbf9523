"""Model presets: a transformers model type and the options that differ from its defaults, from `presets.json`.

The tiny presets train on bytes in seconds on a CPU, and have enough heads for four Ulysses ranks. The others have the
published architecture of the model they are named after, with random weights: the figures of config.json in the
repository on huggingface.co that is their "source".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from usp.fields import AUTO_RATE

PRESET_RATE, PRETRAINED_RATE, LORA_RATE = 3e-3, 1e-5, 1e-4  # peak learning rates of next-token training
LORA_FACTOR = 10  # between the rates of adapters and of all weights


@dataclass(frozen=True)
class Preset:
    model_type: str
    options: dict[str, Any] = field(hash=False)


PRESETS: dict[str, Preset] = {
    name: Preset(stated["model_type"], stated["options"])
    for name, stated in json.loads(Path(__file__).with_name("presets.json").read_text()).items()
}


def settled_rate(asked: float, model: str, preset: float = PRESET_RATE, pretrained: float = PRETRAINED_RATE) -> float:
    """Return the peak learning rate `asked` for `model`; for AUTO_RATE the default for a preset, or for pretrained
    weights."""
    return asked if asked != AUTO_RATE else preset if model in PRESETS else pretrained
