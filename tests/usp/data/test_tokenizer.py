"""Tokenizers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from usp.data.tokenizer import BYTE_VOCAB, ByteTokenizer, as_document
from usp.hf.tokenizers import load_tokenizer, save_tokenizer, tokenizer_of

BYT5 = ByT5Tokenizer()
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE tokenizer that puts <s> before a text, as Llama's does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=ALPHABET)
    bpe.train_from_iterator(["some words of a text"] * 3, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.mark.slow
@given(st.text())
def test_byte_ids_are_those_of_byt5(text: str) -> None:
    if not any(special in text for special in ("</s>", "<pad>", "<unk>", "<extra_id_")):
        tokenizer = ByteTokenizer()
        assert as_document(tokenizer, tokenizer.encode(text)).tolist() == BYT5.encode(text)


def test_the_byte_tokenizer_is_saved_next_to_the_checkpoint_and_found_there(tmp_path: Path) -> None:
    save_tokenizer(load_tokenizer("bytes"), tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert loaded.encode("grün")[:-1] == ByteTokenizer().encode("grün").tolist()
    assert len(loaded) == BYTE_VOCAB
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    found = tokenizer_of("auto", str(tmp_path / "model"))
    assert found == str(tmp_path / "tokenizer")
    assert load_tokenizer(found) == ByteTokenizer(found)


@pytest.mark.parametrize("content", ["[1, 2]", '{"model": {"vocab": 3}}', "{}", "null", "{", "\udcff", "[" * 9000])
def test_a_tokenizer_file_of_another_structure_is_refused(folder: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(folder, tmp_path / "damaged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
        (tmp_path / "damaged" / name).write_bytes(content.encode(errors="surrogateescape"))
        try:
            load_tokenizer(str(tmp_path / "damaged"))
        except ValueError as error:
            assert str(error).startswith(f"tokenizer={tmp_path / 'damaged'}: transformers cannot read it: ")
        else:
            assert name == "tokenizer_config.json"  # which a tokenizer may lack
        shutil.copy(tmp_path / name, tmp_path / "damaged" / name)


def test_the_tokenizer_of_a_model_directory_is_its_own(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert tokenizer_of("auto", str(folder)) == str(folder)
    assert tokenizer_of("auto", "tiny") == "bytes"
    assert tokenizer_of("bytes", str(folder)) == "bytes"
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="holds no tokenizer: set tokenizer to"):
        tokenizer_of("auto", str(tmp_path))


def test_a_saved_tokenizer_gives_the_same_ids(folder: Path, tmp_path: Path) -> None:
    save_tokenizer(load_tokenizer(str(folder)), tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("some text").tolist() == AutoTokenizer.from_pretrained(folder).encode(
        "some text", add_special_tokens=False
    )


def test_documents_begin_as_the_tokenizer_begins_a_text(folder: Path) -> None:
    auto, always, never = (load_tokenizer(str(folder), bos) for bos in ("auto", "always", "never"))
    plain = AutoTokenizer.from_pretrained(folder).encode("text", add_special_tokens=False)
    assert as_document(auto, auto.encode("text")).tolist() == [0, *plain, 1]
    assert as_document(always, always.encode("text")).tolist() == [0, *plain, 1]
    assert as_document(never, never.encode("text")).tolist() == [*plain, 1]
    assert as_document(auto, auto.encode("text"), begin=False).tolist() == [*plain, 1]
    assert as_document(auto, auto.encode("text"), end=False).tolist() == [0, *plain]


def test_a_bos_that_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="bos=always, but tokenizer=bytes has no BOS"):
        load_tokenizer("bytes", "always")


def test_special_tokens_in_a_text_are_text_unless_asked_for(folder: Path) -> None:
    text = "a</s>b"
    plain, parsed = (load_tokenizer(str(folder), parse_special=parse) for parse in (False, True))
    assert 1 not in plain.encode(text) and plain.decode(plain.encode(text)) == text
    assert 1 in parsed.encode(text)
    assert plain.fingerprint != parsed.fingerprint


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="transformers cannot read it"):
        load_tokenizer(str(tmp_path))
