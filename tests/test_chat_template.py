"""The templates' environment, and that a hostile one gets nowhere."""

from datetime import datetime

import pytest

from dflash_jax.chat_template import ChatTemplate
from dflash_jax.config import ConfigError

MESSAGES = [{"role": "user", "content": "<a> é"}, {"role": "assistant", "content": "b"}]


def render(text: str, **variables) -> str:
    return ChatTemplate(text, "model.gguf", {"bos_token": "<s>"}).render(MESSAGES, **variables)


def test_blocks_are_trimmed_and_special_tokens_are_known():
    loop = "{% for m in messages %}\n  {% if true %}\n{{ m.role }};\n  {% endif %}\n{% endfor %}"
    text = "{{ bos_token }}{{ eos_token }}\n" + loop
    assert render(text) == "<s>\nuser;\nassistant;\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{{ messages[0].content | tojson }}", '"<a> é"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}.", "b."),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ 'no tools' if not tools }}{{ missing }}", "no tools"),
        ("{{ enable_thinking }}", "False"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_what_templates_use(text, expected):
    assert render(text, enable_thinking=False) == expected


def test_the_template_refuses():
    with pytest.raises(ConfigError, match=r"model\.gguf: the chat template refused the messages: roles must"):
        render("{{ raise_exception('roles must alternate') }}")


def test_broken_templates_fail_on_use():
    with pytest.raises(ConfigError, match=r"does not compile \(line 2\)"):
        render("ok\n{% for %}")


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content + 1 }}", "{{ missing.attribute }}", "{{ 1 / 0 }}", "{% include 'x' %}"]
)
def test_failures_are_sentences(text):
    with pytest.raises(ConfigError, match=r"model\.gguf: the chat template failed: \w+"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__'))['__mro__'] }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(1000000000) }}",
    ],
)
def test_the_sandbox(text):
    with pytest.raises(ConfigError, match="chat template"):
        render(text)
    assert [message["role"] for message in MESSAGES] == ["user", "assistant"]
