"""The synthetic checkpoints' tokenizer: a byte-level BPE written by hand, and its engram token map.

Everything follows from two numbers, the vocabulary size and how many token ids stay apart for the engram hash, so that
a preset can have exactly the geometry it wants. Needs no tokenizer library.
"""

import unicodedata
from typing import Any

from ds41rt.errors import InputError

LEADING_SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
TRAILING_SPECIALS = ("<｜User｜>", "<｜Assistant｜>", "<｜image｜>", "</think>")
N_FIXED_TOKENS = len(LEADING_SPECIALS) + 256 + len(TRAILING_SPECIALS)
# Compressed ids of the fixed tokens: 26 capitals fold to small letters, tab, CR and LF to the space.
N_FIXED_COMPRESSED = N_FIXED_TOKENS - 26 - 3

_WORDS = """
the and that with this from have what when where which there their would about people because through graph
replay expert layer stream token memory kernel device router weight window segment capture snapshot pointer
engine buffer vector matrix number between another system little water light small great house world under
every found still learn plant cover again animal point mother answer study
"""


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


ALPHABET = _byte_alphabet()
_SPACE = ALPHABET[0x20]


def build_tokenizer(vocab: int, compressed_vocab: int) -> dict[str, Any]:
    """The content of `tokenizer.json` for a vocabulary with exactly these two sizes.

    Prefixes of common words become tokens in up to six spellings (small, Capital, ALL CAPS, each with and without a
    leading space) that share a compressed id. Raises `InputError` for sizes that cannot be met.
    """
    n_merges, n_new = vocab - N_FIXED_TOKENS, compressed_vocab - N_FIXED_COMPRESSED
    merges = _merges(n_new)[: max(n_merges, 0)]
    if not 0 <= n_new <= n_merges == len(merges):
        raise InputError(f"no tokenizer with {vocab} tokens and {compressed_vocab} compressed ids can be built")
    tokens = [*LEADING_SPECIALS, *ALPHABET, *(a + b for a, b in merges), *TRAILING_SPECIALS]
    specials = {t: i for i, t in enumerate(tokens) if t in LEADING_SPECIALS + TRAILING_SPECIALS}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for t, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


def build_token_map(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The content of `engram_token_map.json` for a tokenizer of `build_tokenizer`."""
    first_seen: dict[str, int] = {}
    specials = {t["content"] for t in tokenizer["added_tokens"]}
    ids = [
        first_seen.setdefault(_compression_key(token, token in specials), len(first_seen))
        for token in tokenizer["model"]["vocab"]
    ]
    return {"size": len(first_seen), "map": ids}


def _merges(n_prefixes: int) -> list[tuple[str, str]]:
    """All merges over the first `n_prefixes` word prefixes, one spelling after the other, most basic first."""
    prefixes = list(dict.fromkeys(w[:n] for w in _WORDS.split() for n in range(2, len(w) + 1)))[: max(n_prefixes, 0)]
    if len(prefixes) < n_prefixes:
        return []
    small = [(p[:-1], p[-1]) for p in prefixes]
    capital = [(a.capitalize(), b) for a, b in small]
    upper = [(a.upper(), b.upper()) for a, b in small]
    spaced_small, spaced_capital, spaced_upper = (
        [(_SPACE, a + b) for a, b in kind] for kind in (small, capital, upper)
    )
    return small + spaced_small + capital + spaced_capital + upper + spaced_upper


def _compression_key(token: str, special: bool) -> str:
    """What a token is compared by: its text without case, accents and outer white space."""
    text = token if special else bytes(map(ALPHABET.index, token)).decode("utf-8", errors="replace")
    if "\ufffd" in text:
        return token
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    for white in "\t\r\n":
        folded = folded.replace(white, " ")
    return " " if folded == " " else folded.strip() or text
