"""Vision-language models in train.py: chats with images, whose steps are those of transformers in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.harness.ranks import RankPool
from tests.usp.hf.vision import tiny_vlm
from tests.usp.train.test_trainer import launch_of_pool, metrics_of
from usp.__main__ import main
from usp.config import TrainConfig
from usp.data.batches import Part, read_batch
from usp.data.chats import chat_of
from usp.data.rows import WholeRows
from usp.data.store import TokenStore
from usp.hf.models import read_config
from usp.hf.processors import Images
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import prepare as prepare_rlhf
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.trainer import Trainer, train

STEPS, SEQ_LEN = 3, 256  # the third loss shows the optimizer's states
MARKS = {"gemma3": "<start_of_image>"}
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ 'MARK' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
SIZES = ((20, 12), (64, 60), (9, 33), (30, 30), (48, 16))  # of images, width and height
CONFIG = TrainConfig(
    seq_len=SEQ_LEN,
    steps=STEPS,
    batch_size=2,
    micro_batches=2,
    lr_schedule="constant",
    lr_final=0.1,
    learning_rate=3e-3,
    warmup_steps=0,
    adam_eps=1e-4,
    max_grad_norm=0.5,
    device="cpu",
    checkpoint_every=0,
    log_every=100,
)


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with the tokens and the chat template of a type."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    names = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    special = {"extra_special_tokens": extra} if kind == "gemma3" else {"additional_special_tokens": names[1:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", **special)
    tokenizer.add_tokens(names[:1], special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("MARK", MARKS.get(kind, QWEN_MARK))
    return tokenizer


def write_model(folder: Path, kind: str) -> Path:
    """Write a model of a type with its processor."""
    tokenizer = tokenizer_of(kind)
    image: Any = tokenizer.convert_tokens_to_ids("<image_soft_token>" if kind == "gemma3" else "<|image_pad|>")
    tiny_vlm(kind, vocab=272, image=image).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "gemma3":
        Gemma3ImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
        (folder / "processor_config.json").write_text('{"image_seq_length": 16, "processor_class": "Gemma3Processor"}')
    else:
        patches: dict[str, Any] = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
        size = {"shortest_edge": 64, "longest_edge": 1600}
        Qwen2VLImageProcessorPil(**patches, size=size).save_pretrained(folder)
    return folder


def write_images(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        pixels = generator.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def chats() -> list[list[dict[str, Any]]]:
    """Return chats with no, one and several images."""
    found: list[list[dict[str, Any]]] = []
    for number, images in enumerate([(), (0,), (1,), (), (2, 3), (4,), (0, 2, 4), (), (3,), (1,), (), (2,)]):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"Question {number}: "}]
        for image in images:
            parts += [{"type": "image", "path": f"{image}.png"}, {"type": "text", "text": "see? "}]
        answer = f"it is {'very ' * (number % 4)}clear {number}"
        found.append([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}])
    return found


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "data.jsonl")


@pytest.fixture(autouse=True)
def no_group_stays_open() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def example(folder: Path, kind: str, **changes: Any) -> TrainConfig:
    """Write a model and data below a folder, and return a configuration for both."""
    write_images(folder)
    data = write_rows(folder, [{"messages": messages} for messages in chats()])
    model, cache = write_model(folder / "model", kind), folder / "cache"
    return replace(CONFIG, model=str(model), data=data, data_cache=str(cache), **changes)


# Plain transformers


def document(processor: Any, folder: Path, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return what transformers makes of a chat, with labels for what the assistant writes."""
    for part in (part for message in messages for part in message["content"] if isinstance(part, dict)):
        if part["type"] == "image":
            part["path"] = str(folder / Path(part["path"]).name)
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = dict(processor.apply_chat_template([messages], chat_template=processor.tokenizer.chat_template, **options))
    inputs.pop("attention_mask")
    ids = inputs["input_ids"][0].tolist()
    begins, end = processor.tokenizer.encode("<|im_start|>assistant\n"), processor.tokenizer.eos_token_id
    labels, inside = torch.full((1, len(ids)), -100), False
    for at, token in enumerate(ids):
        if inside:
            labels[0, at], inside = token, token != end
        inside = inside or ids[max(0, at + 1 - len(begins)) : at + 1] == begins
    return inputs | {"labels": labels}


def loss_of(model: Any, documents: list[dict[str, Tensor]]) -> Tensor:
    """Return the mean loss of documents, each by itself."""
    total, count = torch.zeros(()), 0
    for inputs in documents:
        targets = inputs["labels"][0, 1:]
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


def alone(config: TrainConfig, batches: list[list[int]], untrained: tuple[str, ...] = ()) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step on the chats of these numbers, in one process of transformers."""
    model = AutoModelForImageTextToText.from_pretrained(config.model, attn_implementation="eager").train()
    processor = Images(config.model, model.config).processor
    documents = [document(processor, Path(config.data).parent, messages) for messages in chats()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in untrained))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    history = []
    for numbers in batches:
        loss = loss_of(model, [documents[number] for number in numbers])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item()))
    return history


# Runs


def run(config: TrainConfig, folder: str) -> list[list[int]]:
    """Run train.py on a rank, and return the numbers of the chats of each step."""
    prepared = prepare(replace(config, output=folder), launch_of_pool())
    stream, read = prepared.begins_in.batches, []
    _, ends = stream.packed.sources[0].store.bounds(np.arange(len(chats())))
    for step in range(config.steps):
        rows = [stream.packed.row(step * stream.rows + number) for number in range(stream.rows)]
        begins = [begin for row in rows for begin in row.begins.tolist()]
        read.append([int(np.searchsorted(ends, begin, side="right")) for begin in begins])
    Trainer(prepared).run()
    return read


def check_steps(folder: Path, expected: list[tuple[float, float]]) -> None:
    found = [(record["loss"], record["grad_norm"]) for record in metrics_of(folder)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0.0)


GRIDS = {"dp-ulysses": {"sp_ulysses": 2}, "ring-ulysses": {"sp_ulysses": 2, "sp_ring": 2, "batch_size": 4}}


@pytest.mark.parametrize(("kind", "grid"), [("qwen2_5_vl", "dp-ulysses"), ("gemma3", "ring-ulysses")])
@pytest.mark.slow(full=1)
def test_steps_are_those_of_transformers(ranks: RankPool, tmp_path: Path, kind: str, grid: str) -> None:
    config = example(tmp_path, kind, **GRIDS[grid])
    batches = ranks.run(run, 4, config, str(tmp_path / "run"))[0]
    check_steps(tmp_path / "run", alone(config, batches))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("grid", GRIDS)
def test_ten_steps_of_other_types_and_meshes(ranks: RankPool, tmp_path: Path, kind: str, grid: str) -> None:
    """On eight ranks, too, more than half of which have no image."""
    config = example(tmp_path, kind, steps=10, **GRIDS[grid])
    for world_size in (4, 8):
        batches = ranks.run(run, world_size, config, str(tmp_path / f"run-{world_size}"))[0]
        check_steps(tmp_path / f"run-{world_size}", alone(config, batches))


@pytest.mark.slow
def test_a_frozen_encoder_stays_and_the_rest_is_trained(ranks: RankPool, tmp_path: Path) -> None:
    config = example(tmp_path, "qwen3_vl", freeze_encoder=True, steps=3, zero=1, sp_ring=2)
    batches = ranks.run(run, 2, config, str(tmp_path / "run"))[0]
    check_steps(tmp_path / "run", alone(config, batches, untrained=("visual",)))
    before, after = (AutoModelForImageTextToText.from_pretrained(f) for f in (config.model, tmp_path / "run" / "model"))
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(old, new) == ("visual" in name), name


@pytest.mark.exhaustive  # without images: test_lora.py
def test_a_resumed_run_with_adapters_ends_as_one_that_went_through(tmp_path: Path) -> None:
    config = example(tmp_path, "gemma3", lora_rank=2, lora_merge=True, checkpoint_every=1, steps=2)
    config = replace(config, eval_data=config.data, data=write_rows_again(tmp_path))
    whole, parts = replace(config, output=str(tmp_path / "whole")), replace(config, output=str(tmp_path / "parts"))
    train(prepare(whole, Launch()), Launch())
    train(prepare(replace(parts, steps=1), Launch()), Launch())
    train(prepare(replace(parts, resume="auto"), Launch()), Launch())
    check_steps(
        tmp_path / "parts", [(record["loss"], record["grad_norm"]) for record in metrics_of(tmp_path / "whole")]
    )
    base = AutoModelForImageTextToText.from_pretrained(config.model)
    processor = Images(config.model, base.config).processor
    documents = [document(processor, tmp_path, messages) for messages in chats()]
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole" / "model")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "whole" / "adapter")
    losses = [loss_of(model, documents).item() for model in (merged, adapted)]
    assert losses == pytest.approx([metrics_of(tmp_path / "whole")[-1]["eval_loss"]] * 2, rel=1e-5)
    saved = AutoTokenizer.from_pretrained(tmp_path / "whole" / "model")
    assert Images(str(tmp_path / "whole" / "model"), base.config).processor.tokenizer.get_vocab() == saved.get_vocab()


def write_rows_again(folder: Path) -> str:
    """Write the chats with their images in a list of the row, for <image> in texts."""
    rows = []
    for user, assistant in chats():
        images = [part["path"] for part in user["content"] if part["type"] == "image"]
        text = "".join(part.get("text", "<image>") for part in user["content"])
        rows.append({"messages": [{"role": "user", "content": text}, assistant], "images": images})
    (folder / "again").mkdir()
    for number in range(len(SIZES)):
        (folder / "again" / f"{number}.png").symlink_to(folder / f"{number}.png")
    return write_rows(folder / "again", rows)


BAD = {
    "missing": (None, "No such file"),
    "empty": (b"", "its file is empty"),
    "no image": (b"GIF?" * 9, "cannot identify image file"),
    "truncated": (200, "truncated"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.slow
def test_a_bad_image_is_an_error_that_names_file_and_row(tmp_path: Path, what: str) -> None:
    config = example(tmp_path, "gemma3")
    content, said = BAD[what]
    image = tmp_path / "4.png"  # first in the sixth chat
    whole = image.read_bytes()
    image.unlink()
    if content is not None:
        image.write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(ConfigurationError) as refused:
        prepare(config, Launch())
    assert f"{config.data}, line 6: image {image} cannot be read: " in str(refused.value)
    assert said in str(refused.value) and str(refused.value).count("cannot be read") == 1
    (store,) = (
        source.store for source in prepare(replace(config, bad_rows="drop"), Launch()).begins_in.batches.packed.sources
    )
    assert store.manifest.dropped == 2 and store.manifest.images == 7


def test_a_configuration_that_cannot_be_read_is_one_error_of_every_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = example(tmp_path, "gemma3")
    tokenize = ["tokenize", "--data", config.data, "--tokenizer", config.model, "--output", str(tmp_path / "store")]
    file = Path(config.model) / "config.json"
    fields = json.loads(file.read_text())
    for content, said in (
        ("{", "transformers cannot read its config.json: Expecting property name"),
        (json.dumps(fields | {"model_type": "gemma99"}), "config.json: The checkpoint .* has model type `gemma99`"),
        (json.dumps(fields | {"vocab_size": 0}), "its config.json describes no model: vocab_size=0 must be from 1 to"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=said) as read:
            read_config(config.model)
        if "cannot read" in str(read.value):
            assert str(read.value).endswith("correct it, or use a directory written by transformers' save_pretrained")
        capsys.readouterr()
        assert main(tokenize) == 1
        assert capsys.readouterr().err == f"error: {read.value}\n"
        for refused in (partial(prepare, config), partial(prepare_rlhf, RlhfConfig(model=config.model, device="cpu"))):
            with pytest.raises(ConfigurationError) as error:
                refused(Launch())
            assert str(error.value).count(str(read.value).partition(": ")[2]) == 1, str(error.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_rank_looks_up_the_images_of_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows of images in those of others."""
    prepared = prepare(example(tmp_path, "gemma3", seq_len=112), Launch())
    packed, looked_up, images_of = prepared.begins_in.batches.packed, list[tuple[int, ...]](), TokenStore.images
    monkeypatch.setattr(TokenStore, "images", lambda self, *span: looked_up.append(span) or images_of(self, *span))
    numbers, with_none = range(packed.per_epoch), 0
    for number in numbers:
        part = replace(Part.whole(1, packed.seq_len), first=number, images=prepared.images)
        (read,) = read_batch(packed, numbers, part).images
        row = packed.row(number)
        ends = row.begins + np.diff(row.boundaries)
        assert looked_up == [*zip(row.begins.tolist(), ends.tolist(), strict=True)]
        assert read.sizes == (row.images or [prepared.images.blank[0]])
        with_none += not row.images
        looked_up.clear()
    assert 0 < with_none < len(numbers)


def changed_image(config: TrainConfig, folder: str) -> str:
    """Change an image of a prepared run, and return what it says."""
    prepared = prepare(replace(config, output=folder), launch_of_pool())
    dist.barrier()
    if dist.get_rank() == 0:
        Image.new("RGB", (20, 12)).save(Path(config.data).with_name("2.png"))
    dist.barrier()
    with pytest.raises(ConfigurationError) as refused:
        Trainer(prepared).run()
    return str(refused.value)


@pytest.mark.slow
def test_an_image_that_changes_ends_the_run_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    config = example(tmp_path, "gemma3", sp_ring=2)
    said = ranks.run(changed_image, 2, config, str(tmp_path / "run"))
    assert len(set(said)) == 1 and f"image {tmp_path / '2.png'} has changed since the data was tokenized" in said[0]
    assert f"{config.data}, line " in said[0]


@pytest.mark.slow
def test_what_has_no_encoder_of_images_and_what_cannot_divide_it_are_refused(tmp_path: Path) -> None:
    config = example(tmp_path, "gemma3")
    with pytest.raises(ConfigurationError) as refused:
        prepare(replace(config, tp=2, packing="cut", compile=True, sp_layout="balanced"), Launch(world_size=2))
    for part in ("--tp = 2", "--packing cut would cut images", "--compile True", "--sp-layout balanced"):
        assert part in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"line 2: 1 images, which only train.py reads, for a vision-language"):
        prepare(replace(config, model="tiny", chat_template=str(tmp_path / "model" / "chat_template.jinja")), Launch())
    with pytest.raises(ConfigurationError, match="--freeze-encoder freezes an encoder of images, and tiny has none"):
        prepare(replace(config, model="tiny", data="stdlib", freeze_encoder=True), Launch())


@pytest.mark.slow
def test_a_chat_whose_image_would_be_cut_is_left_out(tmp_path: Path) -> None:
    """Of two that are longer than a sequence, and have a target in it."""
    config = example(tmp_path, "qwen2_5_vl", seq_len=80)
    turns = (
        ["So?", "yes", {"type": "image", "path": "1.png"}, "no"],
        [{"type": "image", "path": "0.png"}, "yes", "So?" * 30, "no"],
    )
    rows = [
        {
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": turn if isinstance(turn, str) else [turn]}
                for n, turn in enumerate(chat)
            ]
        }
        for chat in turns
    ]
    write_rows(tmp_path, rows)
    (packed,) = prepare(config, Launch()).begins_in.batches.packed.sources
    assert isinstance(packed, WholeRows)
    assert (packed.long, packed.left_out, packed.per_epoch, len(packed.row(0).images)) == (2, 1, 1, 1)


PATHS = (
    {"type": "image", "path": "a.png"},
    {"type": "image", "image": "file://a.png"},
    {"type": "image_url", "image_url": {"url": "a.png"}},
)


@pytest.mark.parametrize("part", PATHS, ids=str)
def test_images_are_named_in_several_ways(part: dict[str, Any]) -> None:
    chat = chat_of({}, [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "here")
    assert chat.images == ("a.png",) and chat.messages[0]["content"][0] == {"type": "image"}


BAD_ROWS = [
    ({"images": ["a.png"]}, "a text", "here: 1 of 1 images under 'images' have no place in the messages"),
    ({}, [{"type": "image"}], "here: more places for images than the 0 under 'images'"),
    ({}, [{"type": "image", "url": "https://a/b.png"}], "here: 'https://a/b.png' for an image, which must be the path"),
    ({"images": [{"bytes": "x", "path": None}]}, "<image>", "here: an object with the keys bytes, path for an image"),
    ({}, [{"type": "video", "path": "a.mp4"}], "here: a part of type 'video', and only texts and images are read"),
]


@pytest.mark.parametrize(("row", "content", "message"), BAD_ROWS, ids=[message for *_, message in BAD_ROWS])
def test_rows_with_other_images_are_refused(row: dict[str, Any], content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        chat_of(row, [{"role": "user", "content": content}], "here")
