"""A chat template renders as the library renders it, within limits of size and time."""

import resource
import subprocess
import sys
from typing import Any

import pytest
from test_huggingface_data import (
    ALWAYS,
    CALLS,
    CHATML,
    FORGETFUL,
    GEMMA,
    MARKED,
    MISTRAL,
    PLAIN,
    TALK,
)

from samecurve.errors import UserError
from samecurve_products.text.huggingface.data import template_process
from samecurve_products.text.huggingface.data.chat import ChatTemplate, _renderer

pytest.importorskip("transformers")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "fly", "parameters": {"a": [1, 2.5, None]}}}]
# what chat templates of many families do: macros, namespaces, recursion, slices, filters, tests
MANY = r"""
{%- macro shown(value, depth=0) -%}
{%- if value is mapping %}{{ '{' }}{% for k, v in value | dictsort %}{{ k }}:
{{- shown(v, depth + 1) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif value is string %}{{ '"' ~ value | replace('"', "'") ~ '"' }}
{%- elif value is iterable %}[{% for v in value %}{{ shown(v) }}
{{- ', ' if not loop.last }}{% endfor %}]
{%- else %}{{ value | string }}{% endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, first=true, text='') -%}
{%- for m in messages[::-1] -%}
{%- if ns.first and m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}
{%- set ns.first = false %}{% endif %}
{%- endfor -%}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}
{%- set rest = messages %}{% endif -%}
{%- for m in rest if m.content is not none -%}
{%- set content = m.content | trim -%}
{%- if '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|' + m['role'] + '|>' ~ loop.index ~ '/' ~ loop.length ~ loop.cycle('a', 'b') + '\n' -}}
{{- '%s %5.1f|' % (content, 2.5) }}{{ '{:>8}{name!r}'.format(content[:3], name='x') -}}
{{- content.replace(' ', '_').upper() | indent(2, true) }}{{ content | title | list | join('.') -}}
{%- set ns.text = ns.text + content[0] -%}
{%- if loop.index0 > 40 %}{% break %}{% endif -%}
{%- endfor -%}
{{ tools | tojson(indent=2) if tools }}{{ shown(tools) }}{{ ns.text }}{{ ns.last }}
{{ 7 * 3 ** 2 % 5 }}
{{ rest | map(attribute='role') | unique | sort | join(',') }}{{ [1, 2, 3] | sum }}{{ (1, 'a') }}
{{ rest | selectattr('role', 'equalto', 'user') | list | length }}{{ {'a': [none]} }}{{ 'ab' * 3 }}
{%- for kind, group in rest | groupby('role') %}{{ kind }}{{ group | length }}{% endfor %}
{%- set block %}{{ 'in' }} a block{% endset %}{{ block | center(20) }}{{ ','.join(['a', 'b']) }}
{%- for i in range(3) recursive %}{{ i }}{{ loop([]) if i == 0 }}{% else %}none{% endfor %}
{%- macro around() %}<{{ caller('v') }}>{% endmacro %}{% call(x) around() %}{{ x }}
{%- endcall %}{{ nothing }}{{ bos_token }}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""


def of_library(template: str, talk: Any, tools: Any, *, prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    given = {"chat_template": template, "tools": tools, "add_generation_prompt": prompt}
    return str(render([talk], **given, **NAMES)[0][0])


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, FORGETFUL, MISTRAL, GEMMA, CALLS, ALWAYS, PLAIN, MANY]
)
def test_templates_render_as_in_the_library(template: str) -> None:
    """Character for character."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}, *TALK]
    talk += [{**TALK[1], "content": "<think>a\nb</think>\nthe rain", "tool_calls": [{"name": "n"}]}]
    chat = ChatTemplate(template, NAMES, [])
    for messages in (talk[1:], talk, talk * 25):
        for tools in (None, TOOLS):
            for prompt in (False, True):
                text = chat._render(messages, tools=tools, prompt=prompt)
                assert text == of_library(template, messages, tools, prompt=prompt)


DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
OTHER = NESTED.replace("ns", "other")
TUPLES = "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
LISTS = "{% set big = range(100000) | list %}"
HOSTILE = {
    "product": "{{ 'a' * 10**9 }}",
    "turned product": "{{ 10**9 * 'a' }}",
    "list product": "{{ ([0] * 10**9) | length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "doubled": DOUBLED + "{% endfor %}",
    "joined": DOUBLED.replace("ns.x + ns.x", "ns.x ~ ns.x") + "{% endfor %}",
    "printed": DOUBLED.replace("ns.x + ns.x", "'%s%s' % (ns.x, ns.x)") + "{% endfor %}",
    "formatted": DOUBLED.replace("ns.x + ns.x", "'{0}{0}'.format(ns.x)") + "{% endfor %}",
    "replaced": DOUBLED.replace("ns.x + ns.x", "ns.x.replace('a', ns.x)") + "{% endfor %}",
    "block": DOUBLED.replace(
        "{% set ns.x = ns.x + ns.x %}",
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    )
    + "{% endfor %}",
    "width": "{{ '%1000000000d' % 1 }}",
    "given width": "{{ '%*d' % (1000000000, 1) }}",
    "filter's width": "{{ '%1000000000d' | format(1) }}",
    "format's width": "{{ '{:1000000000}'.format(1) }}",
    "mapped width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "precision": "{{ '{:.{}f}'.format(1.0, 1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "indent": "{{ 'a' | indent(1000000000, true) }}",
    "json": "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "batch": "{{ [1] | batch(1000000000, 'a') | list | length }}",
    "slice": "{% for a in [1] | slice(1000000000) %}{% endfor %}",
    "join": LISTS + "{{ ('a' * 1000000).join(big | map('string')) }}",
    "join filter": LISTS + "{{ big | join('a' * 1000000) }}",
    "power": "{% set x = 9 ** (9 ** 9) %}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "nested text": NESTED + "{% endfor %}{{ ns.x }}",
    "nested text in a list": NESTED + "{% endfor %}{{ [ns.x] }}",
    "nested json": NESTED + "{% endfor %}{{ ns.x | tojson }}",
    "nested equality": NESTED + "{% endfor %}" + OTHER + "{% endfor %}{{ ns.x == other.x }}",
    "nested test": NESTED + "{% endfor %}" + OTHER + "{% endfor %}{{ ns.x is eq(other.x) }}",
    "nested in": NESTED + "{% endfor %}" + OTHER + "{% endfor %}{{ ns.x in [other.x] }}",
    "nested key": TUPLES + "{% endfor %}{{ {ns.x: 1} | length }}",
    "nested item": TUPLES + "{% endfor %}{{ {}[ns.x] }}",
    "nested get": TUPLES + "{% endfor %}{{ {}.get(ns.x) }}",
    "nested namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}"
    "{% endfor %}",
    "own text": "{% macro f() %}" + "a" * 100_000 + "{% endmacro %}"
    "{% set ns = namespace(x='') %}{% for i in range(9999) %}{{ f() }}{% endfor %}",
    "loop's text": "{% set x %}{% for i in range(99999) %}"
    + "a" * 9_999
    + "{% endfor %}{% endset %}",
    "marked spans": "{% for i in range(99999) %}{{ 'a' * 999 }}{% generation %}a{% endgeneration %}"
    "{% endfor %}",
    "random words": "{{ lipsum(n=1000000) }}",
}

# ended by the limit of text, of memory, of time (which ends the child)
SHORT = {"product", "width", "doubled", "loops"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in HOSTILE],
)
def test_a_hostile_template_ends_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time and memory; the next conversation is rendered all the same."""
    monkeypatch.setattr(template_process, "SECONDS", 0)  # and the one that has begun
    template = HOSTILE[name]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="the chat template") as refused:
        ChatTemplate(template, NAMES, []).spans(TALK, None, "here")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    print(f"{most >> 10} MiB, {refused.value}")
    assert "data.chat_template" in str(refused.value)
    assert most < 300 << 10
    assert ChatTemplate(PLAIN, NAMES, []).prompt("the sea")


def test_a_prompt_meets_the_same_limits() -> None:
    with pytest.raises(UserError, match="the chat template") as refused:
        ChatTemplate(HOSTILE["product"], NAMES, []).prompt("the sea")
    assert "--no-chat" in refused.value.remedy


def test_a_child_that_ends_is_no_fault_of_the_template() -> None:
    chat = ChatTemplate(PLAIN, NAMES, [])
    text = chat.prompt("the sea")
    child = _renderer()._child
    assert child
    child.kill()
    child.wait()
    with pytest.raises(UserError, match="the process that renders it ended with SIGKILL"):
        chat.prompt("the sea")
    assert chat.prompt("the sea") == text


UNDER_A_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (900 << 20, 900 << 20))
from samecurve_products.text.huggingface.data.chat import ChatTemplate
print(ChatTemplate("{{ messages[0].content }}", {}, []).prompt("the sea"))
"""


def test_a_users_own_limit_may_be_the_smaller_one() -> None:
    command = [sys.executable, "-c", UNDER_A_LIMIT]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "the sea\n"
