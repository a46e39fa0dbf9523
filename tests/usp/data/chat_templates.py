"""Chat templates in the styles of model families, with generation marks, and a tokenizer that has their tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>' }}
{%- endgeneration -%}
{{ '\\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# Reasoning is kept after the last user message only.
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- set answer = message.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in message.content -%}
{%- generation -%}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + (thought or '') + '\\n</think>\\n\\n' }}{% endif -%}
{{ answer + '<|im_end|>' }}
{%- endgeneration -%}
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
LLAMA3 = """\
{{- bos_token -}}
{%- if tools -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions: ' + (tools | tojson(indent=2)) + '<|eot_id|>' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{%- if message.tool_calls -%}
{{ message.tool_calls[0].function | tojson }}
{%- else -%}
{{ message.content | trim }}
{%- endif -%}
{{ '<|eot_id|>' }}
{%- endgeneration -%}
{%- else -%}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""
MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if system else messages -%}
{%- for message in rest -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate: user, assistant, user, ...') }}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else -%}
{%- generation %} {{ message.content | trim + eos_token }}{% endgeneration -%}
{%- endif -%}
{%- endfor -%}
"""
GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<start_of_turn>model\\n' }}
{%- generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration -%}
{{ '\\n' }}
{%- else -%}
{{ '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""
# Ends a chat with another token than a message.
PHI = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration -%}
{%- else -%}
{{ message.content + '<|end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""
DEEPSEEK = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}{% endif -%}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% endif -%}
{%- if message.role == 'assistant' -%}
{{ '<｜Assistant｜>' }}
{%- generation %}{{ message.content + eos_token }}{% endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif -%}
"""
# family: template, BOS, EOS, further special tokens
FAMILIES = {
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    "thinking": (THINKING, None, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
    "gemma": (GEMMA, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "phi": (PHI, None, "<|endoftext|>", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]),
    "deepseek": (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ["<｜User｜>", "<｜Assistant｜>"]),
}
WITHOUT_SYSTEM = ("gemma",)
WITH_TOOLS = ("chatml", "llama3")


Message = dict[str, Any]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def without_marks(template: str) -> str:
    """Return a template that writes the same, and says nothing of what the assistant generates."""
    return re.sub(r"generation(?= *-?%\})", "if true", template.replace("endgeneration", "endif"))


def write_tokenizer(folder: Path, family: str, marks: bool = True) -> Path:
    """Save a byte-level tokenizer with the special tokens of a family, a few merges, and its chat template."""
    template, bos, eos, others = FAMILIES[family]
    tokenizer_of(template if marks else without_marks(template), bos, eos, others).save_pretrained(folder)
    return folder


def tokenizer_of(template: str, bos: str | None, eos: str, others: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with these special tokens, a few merges, and a chat template."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [token for token in (bos, eos, *others) if token]
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the answer of the assistant\n\n is a number"] * 3, trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos)
    saved.add_special_tokens({"additional_special_tokens": others})
    saved.chat_template = template
    return saved
