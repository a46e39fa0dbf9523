"""Images of vision-language models under sequence parallelism.

    whole batch     images are divided over the ranks, balanced by patches
    encoder         each rank runs transformers' own encoder and projector on its images
    exchange        each feature goes to the one rank that has its token
    decoder         transformers' own forward merges them into this rank's tokens, and runs as on text

Features of deeper layers (DeepStack, arXiv 2406.04334) travel with the others. Positions of several axes (mRoPE, arXiv
2409.12191) are those that the model computes for each document as a whole. Images whose tokens attend to each other in
both directions are documents of a prefix tree: each continues the tokens before it, and is all prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from usp.attention import OF_DOCUMENTS, SequenceLayout, compute_now, parse_layout
from usp.data.batches import own_images
from usp.data.chats import Image
from usp.data.rows import balanced
from usp.parallel import ParallelMesh
from usp.sp.in_order import Reshard
from usp.sp.sequence import GridChannel, documents_of, select_tokens, shard_batch
from usp.sp.sp_attention import UnifiedSPAttention
from usp.sp.spans import TokenMoves

from .prune import HANDED, backbone, decoder

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

    from .probe import MaskKind

PLAN = "image_plan"  # the argument of a forward that holds the moves of features
GRIDS = "image_grid_thw"
TILES = "image_position_ids"  # of Gemma 4's patches, -1 for padding
PIXELS = ("pixel_values", GRIDS, TILES)
_COMPUTED = ("attention_mask", "mm_token_type_ids", "token_type_ids")  # by processors, and here from the ids
# Types whose decoder takes images only as tokens, which tests compare with one process.
TYPES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"),
    *("gemma3", "gemma4", "internvl", "llama4", "llava", "vipllava", "aya_vision", "cohere2_vision", "glm_ocr"),
    "minimax_m3_vl",
)
# Types that train.py trains: their encoder is beside the decoder in the backbone.
TRAINED = tuple(kind for kind in TYPES if kind != "llama4")
# Types whose images may be bidirectional, and in layers with which masks: Gemma 4's are not where all keys are seen.
_BLOCKS: dict[str, tuple[MaskKind, ...]] = {"gemma3": ("causal", "sliding"), "gemma4": ("sliding",)}


def shard_image_batch(batch: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Any]:
    """Return this rank's shard of a batch with images that all sequence-parallel ranks hold; no communication.

    Args:
        batch: what the model's processor returns for texts and images, and what `shard_batch` takes: `input_ids`
            (B, S), `labels`, `cu_seqlens`; `pixel_values` and, where the processor gives them, `image_grid_thw` or
            `image_position_ids`, of all images in the order of their tokens. Without images, the others suffice.
        model: after `apply_unified_sp`.

    Returns:
        What `shard_batch` returns, the images that this rank encodes, and `image_plan`, all of which the model takes as
        keyword arguments. `position_ids` are (4, B, tokens) where the model has positions of several axes.

    A rank without images encodes the smallest one as well, whose features nobody uses, so that ranks that share
    parameters call the same layers. For the same reason, either all data-parallel ranks have images or none.

    Raises ValueError for a model whose images are not supported, and for images that do not fit their tokens.
    """
    config, exchanged = model.config, getattr(model, "image_exchange", None)
    if exchanged is None:
        raise ValueError(
            f"the model must be the result of apply_unified_sp, and images of model_type={config.model_type!r} "
            f"supported: of {', '.join(TYPES)} they are"
        )
    images, attention = _images(batch, config), cast(UnifiedSPAttention, model.unified_sp)
    text = {name: value for name, value in batch.items() if name not in (*PIXELS, *_COMPUTED)}
    sharded: dict[str, Any] = shard_batch(text, exchanged.mesh, attention.layout)
    ids, axes = batch["input_ids"], attention.axes
    _check_places(images, ids == config.image_token_id, _documents(batch.get("cu_seqlens"), ids))
    if not images:
        return sharded
    own = own_images([image.patches for image in images], axes.ranks, axes.ring_rank * axes.ulysses + axes.ulysses_rank)
    sharded |= image_inputs(model, sharded, ids, images, own)
    bounds = [0, *accumulate(image.rows for image in images)]
    rows = torch.cat([torch.arange(*bounds[number : number + 2]) for number in own])
    for name in PIXELS:
        if name in batch:
            index = rows if name == "pixel_values" else torch.tensor(own)
            sharded[name] = batch[name].index_select(0, index.to(batch[name].device))
    return sharded


def image_inputs(
    model: PreTrainedModel, shard: Mapping[str, Tensor], ids: Tensor, images: Sequence[Image], own: Sequence[int]
) -> dict[str, Any]:
    """Return what a rank's forward takes beside its tokens and pixels: `image_plan`, and in place of those of `shard`
    the positions of several axes, and the documents of images that attend in both directions.

    Args:
        model: after `apply_unified_sp`.
        shard: `position_ids` and `cu_seqlens` of this rank's tokens, from `shard_batch`.
        ids: (B, S), of all tokens.
        images: of all tokens, in their order. Where no token is one of an image, what this rank encodes for nothing.
        own: those that this rank encodes, from `own_images`.

    Raises ValueError for the balanced and the auto layout with images that attend in both directions.
    """
    attention = cast(UnifiedSPAttention, model.unified_sp)
    config, axes, is_image = model.config, attention.axes, ids == model.config.image_token_id
    if not is_image.any():
        nothing = (torch.zeros(0, dtype=torch.int64),) * axes.ranks
        return {PLAN: TokenMoves(nothing, nothing, (sum(images[number].tokens for number in own), 0))}
    found: dict[str, Any] = {}
    documents = _documents(shard.get("cu_seqlens"), ids)
    seq_len = shard["position_ids"].shape[1] * axes.ranks
    layout = axes.layout(attention.layout, seq_len, documents_of(shard.get("cu_seqlens")))
    if hasattr(backbone(model), "get_rope_index"):
        whole = pad(_several_axes(ids, backbone(model), images, documents), (0, seq_len - ids.shape[1]))
        axial = [select_tokens(axis, axes.positions(layout)).to(shard["position_ids"].device) for axis in whole]
        found["position_ids"] = torch.stack([shard["position_ids"].expand_as(axial[0]), *axial])
    if bidirectional(config):
        if parse_layout(attention.layout)[0] in OF_DOCUMENTS:
            raise ValueError(f"layout={attention.layout!r} does not support images that attend both ways: use zigzag")
        found |= _image_blocks(is_image, documents)
    owners = balanced([image.patches for image in images], axes.ranks)
    found[PLAN] = image_plan(images, owners, own, is_image, layout, axes.ring_rank * axes.ulysses + axes.ulysses_rank)
    return found


def sees_images(config: PretrainedConfig) -> bool:
    """Return whether the model of `config` is trained with its encoder of images."""
    return config.model_type in TRAINED


def encoder_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the encoder of images and its projector, if the model has them: what its backbone has beside the
    decoder."""
    base, text = backbone(model), decoder(model)
    return [] if base is text else [part for part in base.children() if part is not text]


def encoder_blocks(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the repeated layers of the encoder of images."""
    stacks = [m for part in encoder_parts(model) for m in part.modules() if isinstance(m, nn.ModuleList)]
    inside = {id(m) for stack in stacks for m in stack.modules() if m is not stack}
    blocks = (block for stack in stacks if id(stack) not in inside for block in stack)
    yield from (block for block in blocks if next(block.parameters(), None) is not None)


def _documents(cu_seqlens: Tensor | None, ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the boundaries of documents of each row."""
    documents = documents_of(cu_seqlens) or ((0, ids.shape[1]),)
    return documents * len(ids) if len(documents) == 1 else documents


def _images(batch: Mapping[str, Tensor], config: PretrainedConfig) -> list[Image]:
    """Return the images of a batch in order. Raises ValueError for what is not supported."""
    known = (*PIXELS, *_COMPUTED, "input_ids", "labels", "cu_seqlens")
    if unknown := sorted(name for name, value in batch.items() if name not in known and value is not None):
        raise ValueError(f"{', '.join(unknown)} are not supported beside images: {', '.join(known)} are")
    if not batch.get("attention_mask", torch.ones(())).all():
        raise ValueError("attention_mask masks padding: drop it and pack documents, with boundaries in cu_seqlens")
    pixels, vision = batch.get("pixel_values"), config.vision_config
    if dropped := [name for name, value in vars(vision).items() if "dropout" in name and value]:
        raise ValueError(f"{', '.join(dropped)} of the encoder are not supported: set them to 0")
    if pixels is None:
        return []
    if GRIDS in batch:
        patches = batch[GRIDS].prod(-1).tolist()
        grids = [tuple(grid) for grid in batch[GRIDS].tolist()]
        if sum(patches) != len(pixels):
            raise ValueError(f"pixel_values have {len(pixels)} patches, but {GRIDS} says {sum(patches)}")
        sizes = zip(patches, grids, strict=True)
        return [Image(number, number, number // vision.spatial_merge_size**2, grid) for number, grid in sizes]
    if TILES in batch:
        patches = (batch[TILES] != -1).all(-1).sum(-1).tolist()
        return [Image(1, number, number // vision.pooling_kernel_size**2) for number in patches]
    tokens = int((batch["input_ids"] == config.image_token_id).sum())
    return [Image(1, 1, tokens // len(pixels))] * len(pixels)  # of one size, so any number of patches balances them


def _check_places(images: Sequence[Image], is_image: Tensor, documents: Sequence[Sequence[int]]) -> None:
    """Check that images fill the image tokens, and that none is in two documents. is_image: (B, S)."""
    tokens, total = int(is_image.sum()), sum(image.tokens for image in images)
    if tokens != total:
        raise ValueError(f"{len(images)} images have {total} features, but input_ids have {tokens} tokens for them")
    before = pad(is_image.flatten().cumsum(0), (1, 0)).tolist()  # image tokens before each token
    ends = {0, *accumulate(image.tokens for image in images)}
    for row, boundaries in enumerate(documents):
        for at in (*boundaries, is_image.shape[1]):
            if before[row * is_image.shape[1] + at] not in ends:
                raise ValueError(f"an image continues past the end of its document at token {at} of row {row}")


def image_plan(
    images: Sequence[Image],
    owners: Sequence[int],
    own: Sequence[int],
    is_image: Tensor,
    layout: SequenceLayout,
    rank: int,
) -> TokenMoves:
    """Return the moves from the features of the images that `rank` encodes to those of its tokens that stand for
    images. owners: the rank of each image; own: the images that `rank` encodes, which are also those that it sends
    from, if they are its own; is_image: (B, S)."""
    rows, tokens = is_image.shape
    holder, place = (torch.zeros(rows, layout.seq_len, dtype=torch.int64) for _ in range(2))
    for number in range(layout.ring * layout.ulysses):
        for row in range(rows):
            positions = layout.positions(*divmod(number, layout.ulysses), row % layout.rows)
            holder[row, positions], place[row, positions] = number, torch.arange(len(positions))
    place += torch.arange(rows).unsqueeze(1) * layout.local_len
    holder, place = (x[:, :tokens][is_image.cpu()] for x in (holder, place))  # of each feature, as those that follow
    counts = torch.tensor([image.tokens for image in images])
    source, image = torch.tensor(owners).repeat_interleave(counts), torch.arange(len(images)).repeat_interleave(counts)
    here = place[holder == rank].sort().values  # this rank's tokens for images, in order
    lengths = [images[number].tokens for number in own]
    offset = torch.zeros(len(images), dtype=torch.int64)
    offset[list(own)] = torch.tensor([0, *accumulate(lengths)][:-1])
    within = torch.arange(len(source)) - (counts.cumsum(0) - counts)[image] + offset[image]
    ranks = range(layout.ring * layout.ulysses)
    return TokenMoves(
        sends=tuple(within[(source == rank) & (holder == peer)] for peer in ranks),
        receives=tuple(torch.searchsorted(here, place[(source == peer) & (holder == rank)]) for peer in ranks),
        lengths=(sum(lengths), len(here)),
    )


def _several_axes(ids: Tensor, base: Any, images: Sequence[Image], documents: Sequence[Sequence[int]]) -> Tensor:
    """Return the positions (3, B, S) that the model computes for each document; 0 for tokens of none."""
    number, whole = 0, ids.new_zeros(3, *ids.shape)
    for row, boundaries in enumerate(documents):
        for start, stop in pairwise(boundaries):
            document = ids[row : row + 1, start:stop]
            kinds = (document == base.config.image_token_id).int()
            first, left = number, int(kinds.sum())
            while left > 0:
                left, number = left - images[number].tokens, number + 1
            if start < stop:
                grids = ids.new_tensor([image.grid for image in images[first:number]]) if number > first else None
                whole[:, row, start:stop] = base.get_rope_index(document, kinds, image_grid_thw=grids)[0].squeeze(1)
    return whole


def bidirectional(config: PretrainedConfig) -> tuple[MaskKind, ...]:
    """Return the masks of the layers in which tokens of an image attend to each other in both directions."""
    text = config.get_text_config()
    if config.model_type == "gemma4" and getattr(text, "use_bidirectional_attention", None) != "vision":
        return ()
    return _BLOCKS.get(config.model_type, ())


def _image_blocks(is_image: Tensor, documents: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return cu_seqlens, prefix_tree and prefix in which each run of image tokens is a document that continues the one
    before, and all of it a prefix."""
    starts, parents, prefixes = list[Tensor](), list[Tensor](), list[Tensor]()
    for kinds, boundaries in zip(is_image.tolist(), documents, strict=True):
        runs = [
            (image, len([*run]), number)
            for start, stop in pairwise(boundaries)
            for number, (image, run) in enumerate(groupby(kinds[start:stop]))
        ]
        starts.append(torch.tensor([0, *accumulate(length for _, length, _ in runs)]))
        parents.append(torch.tensor([at - 1 if number else -1 for at, (_, _, number) in enumerate(runs)]))
        prefixes.append(torch.tensor([length if image else 0 for image, length, _ in runs]))
    longest = max(map(len, starts))
    return {
        "cu_seqlens": torch.stack([torch.cat((row, row[-1:].expand(longest - len(row)))) for row in starts]),
        "prefix_tree": pad_sequence(parents, batch_first=True, padding_value=-1),
        "prefix": pad_sequence(prefixes, batch_first=True),
    }


class ImageExchange:
    """The hooks and the method by which a model's forward gets the features of this rank's tokens.

    plan: of the current forward; None without images.
    """

    def __init__(self, model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh) -> None:
        self.mesh, self.channel = mesh, GridChannel.of(mesh)
        self.plan: TokenMoves | None = None
        base = backbone(model)
        owner: Any = base if hasattr(base, "get_image_features") else model
        owner.get_image_features = partial(self._features, owner.get_image_features)
        model.register_forward_pre_hook(self._take, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ImageExchange:
        """Share the process groups, which cannot be copied."""
        return copy.copy(self)

    def _take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.plan = kwargs.get(PLAN)
        return args, {name: value for name, value in kwargs.items() if name != PLAN}

    def _features(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Encode this rank's images, and return the features of the image tokens that it has."""
        if self.plan is None:  # of a model whose decoder does not see what is passed to the whole (Llama 4)
            raise ValueError("images come from shard_image_batch")
        output = encode(*args, **{name: value for name, value in kwargs.items() if name not in HANDED})
        main = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"
        given = [output[main], *(output.get("deepstack_features") or ())]
        parts = [torch.cat(tuple(x)) if isinstance(x, tuple | list) else x.flatten(0, -2) for x in given]
        features = torch.cat(parts, dim=-1).unsqueeze(0)
        moved = Reshard.apply(features, self.plan, self.channel, compute_now).squeeze(0)
        split = moved.split([part.shape[-1] for part in parts], dim=-1)
        first, *deeper = ((x,) if isinstance(old, tuple | list) else x for x, old in zip(split, given, strict=True))
        output[main] = first
        if deeper:
            output["deepstack_features"] = deeper
        return output
