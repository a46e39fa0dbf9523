"""Images of chats, through the processor in a model's folder: their tokens in a text, and their pixels.

Each image is processed by itself, so that a rank reads only those that it encodes. Processors of transformers replace
what a chat template writes for an image by as many tokens as it has features.
"""

from __future__ import annotations

import hashlib
import io
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from PIL import UnidentifiedImageError
from torch import Tensor
from transformers import PretrainedConfig
from transformers.image_utils import load_image
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from usp.data.chats import Image, StoredImage
from usp.parallel import option

from .images import GRIDS, PIXELS, TILES, sees_images
from .models import read_config

FILES = ("processor_config.json", "preprocessor_config.json")  # a folder with one of these has a processor
COPIED = (*FILES, "video_preprocessor_config.json")
BLANK = 64  # pixels of each side of the image that ranks without one encode
Span = tuple[int, int]  # characters


@dataclass(frozen=True)
class Images:
    """The images of a model.

    folder: with its processor. config: of the model.
    """

    folder: str
    config: PretrainedConfig

    def __getstate__(self) -> dict[str, Any]:  # the class of the processor is made here
        return {name: value for name, value in vars(self).items() if name != "processor"}

    @cached_property
    def processor(self) -> Any:
        """The processor, without that of videos, which needs more packages.

        Raises ValueError for one that cannot be read, or whose tokens for images are not the model's.
        """
        kind: Any = PROCESSOR_MAPPING[type(self.config)]
        given = option("model", self.folder)

        class OfImages(kind):
            @classmethod
            def get_attributes(cls) -> list[str]:
                return [name for name in super().get_attributes() if name != "video_processor"]

        try:
            processor = OfImages.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError, ImportError, TypeError, AttributeError) as error:
            raise ValueError(given + f": transformers cannot read its processor: {error}") from error
        if processor.image_token_ids != [self.config.image_token_id]:
            writes = f": its processor writes ids {processor.image_token_ids} for an image, and its config.json says "
            raise ValueError(given + writes + f"image_token_id={self.config.image_token_id}")
        return processor

    @property
    def token_id(self) -> int:
        """The id that stands for a feature of an image."""
        return self.config.image_token_id

    @cached_property
    def fingerprint(self) -> str:
        """Everything that the tokens and pixels of an image depend on."""
        processor = self.processor
        content = f"{processor.image_token} {processor.image_processor.to_json_string()} {processor.to_json_string()}"
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        return f"{type(processor.image_processor).__name__} {digest}"

    def place(
        self, text: str, spans: Sequence[Span], paths: Sequence[str], where: str
    ) -> tuple[str, list[Span], list[StoredImage]]:
        """Return a rendered chat with the tokens of its images, the characters of `spans` in it, and the images.

        Raises ValueError, naming `where`, for another number of places than images, and for an image that cannot be
        read.
        """
        mark, parts = self.processor.image_token, text.split(self.processor.image_token)
        if len(parts) != len(paths) + 1:
            raise ValueError(
                f"{where}: {len(paths)} images, and the chat template of {self.folder} writes {mark!r} "
                f"{len(parts) - 1} times: it must stand once for each image, and nowhere else"
            )
        found, longer = list[StoredImage](), list[int]()  # longer: by how much, with the tokens of each image
        whole = parts[0]
        for path, part in zip(paths, parts[1:], strict=True):
            image, digest = _read(path, where)
            sizes, _, tokens = self._processed(image, f"{where}: image {path}")
            found.append(StoredImage(**vars(sizes), path=path, digest=digest, where=where))
            longer.append(len(tokens) - len(mark))
            whole += tokens + part
        ends = [match.end() for match in re.finditer(re.escape(mark), text)]  # of the places for images

        def moved(place: int) -> int:
            return place + sum(longer[: bisect_right(ends, place)])

        return whole, [(moved(begin), moved(end)) for begin, end in spans], found

    def pixels(self, image: StoredImage) -> dict[str, Tensor]:
        """Return what the model takes of an image. Raises ValueError, naming its file and its row, for one that cannot
        be read, or is not the one whose tokens are in the data."""
        read, digest = _read(image.path, image.where)
        if digest != image.digest:
            raise ValueError(
                f"{image.where}: image {image.path} has changed since the data was tokenized: restore it, or remove "
                f"the token store to tokenize the data again"
            )
        return self._processed(read, f"{image.where}: image {image.path}")[1]

    @cached_property
    def blank(self) -> tuple[Image, dict[str, Tensor]]:
        """An image that ranks without any encode, so that all call the same layers."""
        return self._processed(Pillow.new("RGB", (BLANK, BLANK)), "a blank image")[:2]

    def _processed(self, image: Any, name: str) -> tuple[Image, dict[str, Tensor], str]:
        """Return the sizes of an image, its pixels, and the text that stands for it. name: for messages."""
        options = {"return_tensors": "pt", "return_text_replacement_offsets": True}
        try:
            output = self.processor(text=[self.processor.image_token], images=[[image]], **options)
        except (ValueError, TypeError, RuntimeError) as error:  # of its shape
            raise ValueError(f"{name} cannot be processed: {error}") from error
        pixels = {name: output[name] for name in PIXELS if name in output}
        grid = tuple(pixels[GRIDS][0].tolist()) if GRIDS in pixels else ()
        rows = len(pixels["pixel_values"])
        patches = int((pixels[TILES] != -1).all(-1).sum()) if TILES in pixels else rows
        tokens = int((output["input_ids"] == self.config.image_token_id).sum())
        return Image(rows, patches, tokens, grid), pixels, output["text_replacement_offsets"][0][0]["replacement"]


def load_images(model: str) -> Images | None:
    """Return the images of the model in a folder; None for what is no vision-language model. Raises ValueError if the
    folder has a configuration that cannot be read, as `read_config`, or no processor that can."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return None
    config = read_config(model)
    if not sees_images(config):
        return None
    if not any((folder / name).is_file() for name in FILES):
        missing = f" has no processor ({' or '.join(FILES)}), which reads its images: copy it from the model's release"
        raise ValueError(option("model", model) + missing)
    images = Images(str(folder), config)
    images.fingerprint  # noqa: B018 - reads the processor
    return images


def _read(path: str, where: str) -> tuple[Any, str]:
    """Return an image in RGB, turned as its file says, and the hash of its file. Raises ValueError, naming `where`, for
    a file that is missing, empty, truncated or no image."""
    try:
        content = Path(path).read_bytes()
        with Pillow.open(io.BytesIO(content)) as opened:
            image = load_image(opened)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        why = "its file is empty" if isinstance(error, UnidentifiedImageError) and not content else error
        raise ValueError(f"{where}: image {path} cannot be read: {why}") from error
    return image, hashlib.blake2b(content, digest_size=16).hexdigest()
