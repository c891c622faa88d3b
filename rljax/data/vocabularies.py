"""Vocabularies as `tokenizers` objects: from a GGUF file's metadata, or from a set of characters.

A GGUF file keeps tokens, merges or scores, and only the name of the rule that cuts text before the
merges (`tokenizer.ggml.pre`); the rules below are those of the published tokenizers and of
llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
GPT2 = ("default", "gpt-2", "gpt2")
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "deepseek-r1-qwen")


def used_tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The token list without the padding that converters append ("[PAD151665]", ...)."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    while len(tokens) > 1 and re.fullmatch(r"\[PAD\d+\]", tokens[-1]):
        tokens.pop()
    return tokens


def _types(metadata: Mapping[str, Any]) -> list[int]:
    """The kind of each token: NORMAL, CONTROL, ..."""
    default = [NORMAL] * len(metadata["tokenizer.ggml.tokens"])
    return [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", default)]


def from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file, without a post-processor.

    Raises:
      ValueError: naming a tokenizer model or pre-tokenizer that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"the GGUF file has a tokenizer of kind {model!r}; rljax builds 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece): use the tokenizer of the model's Hugging Face folder"
        )
    parts = _byte_level(metadata) if model == "gpt2" else _sentencepiece(metadata)
    whole = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **parts}
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def from_characters(characters: str, special: Sequence[str]) -> tokenizers.Tokenizer:
    """One id a character, after the ids of the special tokens; other characters are refused."""
    vocab = {token: i for i, token in enumerate([*special, *dict.fromkeys(characters)])}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, token, True) for i, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {**split, "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unknown character>"},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _added(i: int, content: str, special: bool, normalized: bool = False) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": i, "content": content, **flags, "normalized": normalized, "special": special}


def _bpe(tokens: Sequence[str], merges: list, **settings: Any) -> dict[str, Any]:
    absent = dict.fromkeys(("dropout", "unk_token"))
    absent |= dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocab = {token: i for i, token in enumerate(tokens)}
    return {"type": "BPE", **absent, **flags, "vocab": vocab, "merges": merges, **settings}


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Byte-level BPE (GPT-2 and after), with the cutting rule that `tokenizer.ggml.pre` names."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    regex = pre in GPT2 or pre == "smollm"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [{**level, "use_regex": regex}]
    if pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif pre in LLAMA3 or pre in QWEN2:
        pattern = {"Regex": LLAMA3_SPLIT if pre in LLAMA3 else QWEN2_SPLIT}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        steps.insert(0, split)
    elif pre not in GPT2:
        known = ", ".join((*GPT2, *LLAMA3, *QWEN2, "smollm"))
        raise ValueError(
            f"the GGUF file names the pre-tokenizer {pre!r}; rljax knows {known}: use the "
            "tokenizer of the model's Hugging Face folder"
        )
    tokens = used_tokens(metadata)
    types = _types(metadata)
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "added_tokens": [
            _added(i, token, types[i] == CONTROL)
            for i, token in enumerate(tokens)
            if types[i] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre in QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**level, "use_regex": regex},
        "model": _bpe(tokens, merges, ignore_merges=pre in LLAMA3),
    }


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """SentencePiece BPE: spaces become "▁", unknown characters become bytes, scores become merges.

    SentencePiece joins the neighbours whose union has the best score; as merges, each token is
    listed under all its cuts into two tokens, best scores first.
    """
    tokens = used_tokens(metadata)
    types = _types(metadata)
    scores = metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    merges = []
    for i in sorted(ids.values(), key=lambda i: -scores[i]):
        token = tokens[i]
        cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in ids and b in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "added_tokens": [
            _added(i, token, types[i] != USER_DEFINED, types[i] == USER_DEFINED and not prefix)
            for i, token in enumerate(tokens)
            if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*before, space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *after],
        },
        "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }
