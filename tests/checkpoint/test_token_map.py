"""Compressed token ids: the file, the rebuilt map, and what happens when neither fits."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from shard_files import edit_json

from ds41rt.checkpoint.token_map import MAP_FILE, TOKENIZER_FILE, load_token_map, load_tokenizer, rebuild_token_map
from ds41rt.config import ModelConfig
from ds41rt.errors import CheckpointError, UnsupportedError

TINY_A = Path(__file__).parents[1] / "goldens" / "tiny-a" / "checkpoint"
CFG = ModelConfig.from_checkpoint(TINY_A)


@pytest.fixture
def text_only(tmp_path: Path) -> Path:
    """Only the two text files, writable."""
    for name in (MAP_FILE, TOKENIZER_FILE):
        (tmp_path / name).write_bytes((TINY_A / name).read_bytes())
    return tmp_path


@pytest.fixture
def no_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_file_and_rebuilt_map_agree() -> None:
    ids = load_token_map(TINY_A, CFG)
    assert ids.shape == (512,)
    assert ids.tolist() == rebuild_token_map(load_tokenizer(TINY_A))
    assert ids.max() + 1 == CFG.engram_compressed_vocab


def test_map_is_rebuilt_without_the_file(text_only: Path) -> None:
    (text_only / MAP_FILE).unlink()
    assert load_token_map(text_only, CFG).tolist() == load_token_map(TINY_A, CFG).tolist()


def test_what_counts_as_the_same_token() -> None:
    """Compatibility forms, accents, case, and outer white space fold; a lone space and an empty fold stay."""
    from tokenizers import Tokenizer, models

    same = [
        ["a", "A", "á", " a", "a\t", "ａ", "\r\nÀ "],
        [" ", "\t", "\n \r"],
        ["b c", "B\t\nC"],
        ["ﬁ", "fi"],
        ["\v"],
        ["ø"],
    ]
    vocab = {text: i for i, text in enumerate(t for group in same for t in group)}
    want = [i for i, group in enumerate(same) for _ in group]
    assert rebuild_token_map(Tokenizer(models.WordLevel(vocab, unk_token="ø"))) == want


def test_the_file_wins(text_only: Path) -> None:
    def swap(value: Any) -> None:
        value["map"][100], value["map"][101] = value["map"][101], value["map"][100]

    edit_json(text_only / MAP_FILE, swap)
    want = load_token_map(TINY_A, CFG).tolist()
    want[100], want[101] = want[101], want[100]
    assert load_token_map(text_only, CFG).tolist() == want


def test_neither_source(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither engram_token_map\.json nor tokenizer\.json"):
        load_token_map(tmp_path, CFG)


@pytest.mark.usefixtures("no_tokenizers")
def test_without_the_extra(text_only: Path) -> None:
    assert load_token_map(text_only, CFG).shape == (512,)
    (text_only / MAP_FILE).unlink()
    with pytest.raises(UnsupportedError, match=r"ds41rt\[text\]"):
        load_token_map(text_only, CFG)
    with pytest.raises(UnsupportedError, match=r"ds41rt\[text\]"):
        load_tokenizer(text_only)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(size=294), "size is 294"),
        (lambda v: v.update(size=True), "size"),
        (lambda v: v["map"].pop(), "covers 511 tokens"),
        (lambda v: v["map"].__setitem__(9, 295), "compressed ids"),
        (lambda v: v["map"].__setitem__(511, 0), "compressed ids"),
        (lambda v: v["map"].__setitem__(9, -1), "map.9"),
        (lambda v: v["map"].__setitem__(9, 1.5), "map.9"),
        (lambda v: v.pop("map"), "map"),
    ],
)
def test_bad_map_is_refused(text_only: Path, change: Any, says: str) -> None:
    edit_json(text_only / MAP_FILE, change)
    with pytest.raises(CheckpointError, match=says):
        load_token_map(text_only, CFG)


def test_tokenizer_of_another_size_is_refused(text_only: Path) -> None:
    (text_only / MAP_FILE).unlink()

    def drop_last_merge(value: Any) -> None:
        value["model"]["merges"].pop()
        value["model"]["vocab"] = {t: i for t, i in value["model"]["vocab"].items() if i != 507}

    edit_json(text_only / TOKENIZER_FILE, drop_last_merge)
    with pytest.raises(CheckpointError, match="covers 511 tokens"):
        load_token_map(text_only, CFG)


def test_tokenizer_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps({"model": 1}))
    with pytest.raises(CheckpointError, match="not a usable tokenizer"):
        load_tokenizer(tmp_path)
