"""Text to ids and back: tokenizers, chat templates, and which tokens of a chat are trained.

Ids are what travels: a prompt is encoded once, sampled ids are never decoded and encoded again, and
a conversation grows by `extend`, which encodes the new text alone. Text rendered by a chat template
is encoded without the tokenizer's own special tokens; then it is given exactly one
beginning-of-sequence id, or none where the model uses none.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from rljax.data import vocabularies

Message = Mapping[str, Any]  # {"role": ..., "content": ..., and what the template reads}

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which some templates carry, as their plain content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes HTML


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """A template with what transformers' templates may use, in a sandbox: it is foreign code."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its special ids and its chat template.

    Attributes:
      backend: the `tokenizers` object.
      special: {"bos_token": text, "eos_token": ...}, those that exist.
      adds_bos: whether a prompt starts with the beginning-of-sequence id.
      stop_ids: ids that end a completion: of the model, the tokenizer and the chat template.
      template: the chat template (jinja), or None for a base model.
      settings: further fields of tokenizer_config.json, written back by `save`.
    """

    backend: tokenizers.Tokenizer
    special: Mapping[str, str]
    adds_bos: bool
    stop_ids: tuple[int, ...]
    template: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], template: str | None = None) -> Tokenizer:
        """Reads a Hugging Face folder: tokenizer.json, and beside it what there is of
        tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

        Args:
          template: a chat template to use in place of the folder's.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json, which holds the vocabulary; if it has another "
                "form (tokenizer.model, vocab.json), convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        extra = _read_json(folder / "special_tokens_map.json")
        special = {k: _content(settings.get(k) or extra.get(k)) for k in _SPECIAL}
        own = settings.pop("chat_template", None)
        if isinstance(own, list):  # several by name
            own = {entry["name"]: entry["template"] for entry in own}.get("default")
        if (folder / "chat_template.jinja").exists():
            own = (folder / "chat_template.jinja").read_text()
        model, generation = (
            _read_json(folder / name) for name in ("config.json", "generation_config.json")
        )
        return _build(
            backend,
            {k: v for k, v in special.items() if v is not None},
            adds_bos=settings.get("add_bos_token"),
            stops=[*_as_ids(generation.get("eos_token_id")), *_as_ids(model.get("eos_token_id"))],
            template=template if template is not None else own,
            settings=settings,
            model_bos=model.get("bos_token_id"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], template: str | None = None) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's metadata describes (`models.gguf.read(...)`)."""
        if "tokenizer.ggml.tokens" not in metadata:
            raise ValueError(
                "the GGUF file holds no tokenizer; use the tokenizer.json of the model's folder"
            )
        backend = vocabularies.from_gguf(metadata)
        tokens = vocabularies.used_tokens(metadata)

        def token(name: str) -> int | None:
            i = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return int(i) if i is not None and int(i) < len(tokens) else None  # 2**32 - 1 = none

        names = {
            "bos_token": "bos",
            "eos_token": "eos",
            "unk_token": "unknown",
            "pad_token": "padding",
        }
        special = {k: tokens[i] for k, name in names.items() if (i := token(name)) is not None}
        adds = metadata.get("tokenizer.ggml.add_bos_token")
        if adds is None:  # llama.cpp's defaults
            llama3 = metadata.get("tokenizer.ggml.pre") in vocabularies.LLAMA3
            adds = metadata["tokenizer.ggml.model"] == "llama" or llama3
        return _build(
            backend,
            special,
            adds_bos=bool(adds),
            stops=[i for name in ("eos", "eot", "eom") if (i := token(name)) is not None],
            template=template or metadata.get("tokenizer.chat_template"),
            settings={},
            model_bos=token("bos"),
        )

    @classmethod
    def from_characters(cls, characters: str, template: str | None = None) -> Tokenizer:
        """One id a character, for models trained from nothing; ids 0 and 1 are padding and end."""
        backend = vocabularies.from_characters(characters, ("<pad>", "<eos>"))
        special = {"pad_token": "<pad>", "eos_token": "<eos>"}
        return _build(backend, special, False, [1], template, {}, None)

    def with_template(self, template: str) -> Tokenizer:
        """The tokenizer with another chat template; its end-of-turn token becomes a stop id."""
        return _build(
            self.backend, self.special, self.adds_bos, self.stop_ids, template, self.settings, None
        )

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text, None if there is none."""
        return self.backend.token_to_id(token)

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id; see `adds_bos` for whether prompts get it."""
        return self.token_id(self.special["bos_token"]) if "bos_token" in self.special else None

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; in a chat the end of a turn is another one of `stop_ids`."""
        name = self.special.get("eos_token")
        return self.token_id(name) if name else (self.stop_ids[0] if self.stop_ids else None)

    @property
    def pad_id(self) -> int:
        """An id to fill rows with. It may equal an end id: masks come from lengths."""
        name = self.special.get("pad_token")
        found = self.token_id(name) if name else self.eos_id
        return 0 if found is None else found

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text that starts a sequence; with `bos`, as a prompt of this model starts."""
        ids = self._ids(self.backend, text)
        return self._one_bos(ids) if bos else ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of ids; special tokens such as the end of a turn are left out unless `special`."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    def extend(self, ids: Iterable[int], text: str) -> list[int]:
        """`ids` unchanged, then the ids of `text`, encoded by itself as a continuation.

        Encoding the whole text anew could give other ids for what was sampled (he|llo, hello).
        """
        return [*(int(i) for i in ids), *self._ids(self._continuing, text)]

    def render(self, messages: Sequence[Message], generate: bool = True, **variables: Any) -> str:
        """Text of a chat by the template; with `generate` it ends where the assistant begins.

        Args:
          variables: what the template reads besides, such as tools or enable_thinking.
        """
        if self.template is None:
            raise ValueError(
                "this tokenizer has no chat template (a base model?); give it one with "
                "tokenizer.with_template(chat.CHATML) or another text, or use plain string prompts"
            )
        if not messages:
            raise ValueError("a chat needs at least one message: {'role': 'user', 'content': ...}")
        try:
            return _compiled(self.template).render(
                **{"tools": None, "documents": None, **self.special, **variables},
                messages=[dict(m) for m in messages],
                add_generation_prompt=generate,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ValueError(
                f"the chat template does not take messages of the roles {roles}: {error}"
            ) from error

    def chat(
        self, messages: Sequence[Message], generate: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a chat, with exactly one beginning-of-sequence id (or none; see `adds_bos`)."""
        return self.encode(self.render(messages, generate, **variables))

    def chat_with_mask(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[list[int], list[float]]:
        """Ids of a chat up to its last answer, and 1.0 on what the assistant said.

        Trained are the content of each assistant message and the token that ends it. Everything
        before an answer is encoded as `chat` does when it asks for that answer, so that the model
        is trained on the very ids it will see: the ids begin with `chat(messages before the first
        answer)`. An answer that the template leaves without an end token gets `eos_id`, if last.

        Raises:
          ValueError: if the template rewrites earlier messages when later ones are added (some drop
            the reasoning of earlier answers); train on one answer a row then.
        """
        whole = self.render(messages, False, **variables)
        ids: list[int] = []
        mask: list[float] = []
        at = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise ValueError("a chat to train on must not begin with the assistant's message")
            start, end = self._answer(whole, messages, i, variables)
            asked = self.extend(ids, whole[at:start]) if ids else self.encode(whole[:start])
            mask += [0.0] * (len(asked) - len(ids))
            ids, at = self.extend(asked, whole[start:end]), end
            mask += [1.0] * (len(ids) - len(asked))
        if not ids:
            raise ValueError("the chat has no message of the role 'assistant', so nothing to train")
        if ids[-1] not in self.stop_ids and self.eos_id is not None:
            ids, mask = [*ids, self.eos_id], [*mask, 1.0]
        return ids, mask

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and
        generation_config.json (the stop ids), as transformers' AutoTokenizer loads them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.settings,
            **self.special,
        }
        (folder / "tokenizer_config.json").write_text(_dump(settings))
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template)
        generation = {
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.stop_ids),
            "pad_token_id": self.pad_id,
        }
        (folder / "generation_config.json").write_text(_dump(generation))

    @functools.cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The backend without the space that some put before every text."""
        if isinstance(self.backend.model, tokenizers.models.WordLevel):
            return self.backend  # one id a character, and "a" may be none of them
        first = self.backend.encode("a", add_special_tokens=False).tokens
        if not first or first[0][0] not in "▁Ġ":
            return self.backend
        whole = json.loads(self.backend.to_str())
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            whole[part] = _without_prefix(whole[part])
        return tokenizers.Tokenizer.from_str(json.dumps(whole))

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the binding raises no narrower type
            if "UNK" not in str(error):
                raise
            vocab = backend.get_vocab()
            lost = sorted({c for c in text if c not in vocab})
            raise ValueError(f"the vocabulary has no id for the characters {lost}") from error

    def _one_bos(self, ids: list[int]) -> list[int]:
        """`ids` after exactly one beginning-of-sequence id, or at most one where none is added."""
        first = 0
        while first < len(ids) and ids[first] == self.bos_id:
            first += 1
        if self.bos_id is not None and (self.adds_bos or first):
            ids = [self.bos_id, *ids[first:]]
            assert ids[1:2] != [self.bos_id]
        return ids

    def _answer(
        self, whole: str, messages: Sequence[Message], i: int, variables: Any
    ) -> tuple[int, int]:
        """Where message i, an answer, begins in the rendered chat, and where its end token ends."""
        asked = self.render(messages[:i], True, **variables)
        told = self.render(messages[: i + 1], False, **variables)
        both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, told))
        same = sum(1 for _ in both)  # not all of `told`: some templates write on after an answer
        if whole.startswith(asked) and same > len(asked):
            stops = (self.backend.id_to_token(stop) for stop in self.stop_ids)
            ends = (whole.rfind(stop, len(asked), same) + len(stop) for stop in stops if stop)
            end = max((end for end in ends if end > len(asked)), default=0)
            if end or same == len(told):
                return len(asked), end or same
        raise ValueError(
            f"the chat template renders message {i} differently when later ones follow, or when it "
            "is asked for, so the ids seen in training would not be those seen in sampling; train "
            f"on one answer a row: chat_with_mask(messages[: {i + 1}])"
        )


def _build(
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    adds_bos: bool | None,
    stops: Iterable[int],
    template: str | None,
    settings: Mapping[str, Any],
    model_bos: int | None,
) -> Tokenizer:
    """Decides who adds the beginning-of-sequence id, and collects the stop ids."""
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    by_template = template is not None and re.search(r"\bbos_token\b", template) is not None
    by_backend = bos is not None and backend.encode("a").ids[:1] == [bos]
    adds = bos is not None and (by_template or (by_backend if adds_bos is None else adds_bos))
    ends: list[int | None] = [*stops]
    if "eos_token" in special:
        ends.append(backend.token_to_id(special["eos_token"]))
    if adds and not by_backend:  # for other readers of the saved file; `encode` does not use it
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[special["bos_token"], "$A"], special_tokens=[(special["bos_token"], bos)]
        )
    made = Tokenizer(backend, special, adds, (), template, settings)
    stops = tuple(dict.fromkeys(i for i in [*ends, *_turn_end(made)] if i is not None))
    token = None
    if model_bos is not None and not adds and adds_bos is None:
        token = backend.id_to_token(model_bos)
    if token and model_bos not in (*stops, made.pad_id) and token not in (template or ""):
        warnings.warn(
            f"the model's config names the beginning-of-sequence token {token!r}, but neither the "
            "tokenizer nor the chat template adds it; if the model was trained with it, set "
            "add_bos_token in tokenizer_config.json to true (false silences this)",
            stacklevel=3,
        )
    return dataclasses.replace(made, stop_ids=stops)


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The special token that the chat template writes after an answer, if it does."""
    if tokenizer.template is None:
        return []
    mark = "ANSWER"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.render(messages, generate=False)
    except (ValueError, TypeError, KeyError):  # a template for other messages
        return []
    ids = tokenizer._ids(tokenizer._continuing, text.rpartition(mark)[2].lstrip())
    added = tokenizer.backend.get_added_tokens_decoder()
    return [ids[0]] if ids and ids[0] in added else []


def _without_prefix(part: Any) -> Any:
    """A normalizer, pre-tokenizer or decoder (as JSON) that adds or strips no leading space."""
    if not isinstance(part, dict):
        return part
    part = dict(part)
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in part:
            kept = (p for p in part[key] if p["type"] not in ("Prepend", "Strip"))
            part[key] = [_without_prefix(p) for p in kept]
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
