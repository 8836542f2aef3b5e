"""Conversations as other trainers write them: calls of tools, weights, keys beside the content."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_huggingface_data import CHATML, FORGETFUL, MARKED, MISTRAL, TALK, prepared, write_lines

from samecurve.errors import UserError
from samecurve_products.text.huggingface.data.chat import ChatTemplate
from samecurve_products.text.huggingface.data.document_columns import document_of

pytest.importorskip("transformers")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "</s>", "<tool_call>", "</tool_call>"]
# as Qwen2.5's template writes a call, and a list of tools
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": %s}</tool_call>'
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    + CALL
    % "{{ c.function.arguments | tojson }}"
    + "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as DeepSeek's template does, it adds the arguments to a text
JOINED = CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
PRINTED = CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
TILDE = CALLS.replace("c.function.arguments | tojson", "'' ~ c.function.arguments")
FORGETFUL_CALLS = CALLS.replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content or '' }}",
)
# what was thought is written in the last turn alone, as Qwen3's template does
THINKING = FORGETFUL.replace("<think></think>", "<think>{{ m.reasoning_content }}</think>")


def called(arguments: Any) -> list[dict[str, Any]]:
    """A conversation in OpenAI's form, with one call of a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    return [
        {"role": "user", "content": "rain in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "none"},
        {"role": "assistant", "content": "It is dry."},
    ]


def learnt(template: str, talk: list[dict[str, Any]], tools: Any = None) -> list[str]:
    text, spans = ChatTemplate(template, NAMES, SPECIAL).spans(talk, tools, "rows.jsonl:7")
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("template", [CALLS, JOINED, PRINTED, TILDE, FORGETFUL_CALLS])
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_arguments_that_are_a_json_text_are_learnt_as_json(
    template: str, content: str | None
) -> None:
    """OpenAI's `arguments` is a text. A template that prints it gets it as it stands."""
    talk = called('{"city": "Rome", "days": 2}')
    talk[1]["content"] = content
    call = CALL.replace("{{ c.function.name }}", "rain") % '{"city": "Rome", "days": 2}'
    turns = [f"{content or ''}{call}<|im_end|>", "It is dry.<|im_end|>"]
    if template is FORGETFUL_CALLS:
        turns[1] = "<think></think>It is dry.<|im_end|>"
    assert learnt(template, talk) == turns


def test_no_argument_is_learnt_as_python() -> None:
    """Also where a turn says the same in Python's form and in JSON."""
    arguments = '{"city": "Rome", "ok": true, "days": [1,2], "at": null}'
    said = f"{json.loads(arguments)} is {arguments}. "
    for template in (PRINTED, TILDE):
        talk = called(arguments)
        talk[1]["content"] = said
        assert learnt(template, talk)[0] == said + (
            f'<tool_call>{{"name": "rain", "arguments": {arguments}}}</tool_call><|im_end|>'
        )
    talk = called(arguments)
    talk[1]["content"] = said
    as_json = arguments.replace("[1,2]", "[1, 2]")  # as the template writes an object
    assert f'"arguments": {as_json}}}</tool_call>' in learnt(CALLS, talk)[0]


@pytest.mark.parametrize("arguments", ["{ }", "[1,2]", '{"it\'s":1}', "true"])
def test_arguments_that_python_prints_as_json_stay_objects(arguments: str) -> None:
    assert learnt(CALLS, called(arguments)) == learnt(CALLS, called(json.loads(arguments)))


def test_arguments_that_are_read_one_by_one_stay_objects() -> None:
    each = "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
    talk = called('{"city": "Rome"}')
    talk[1]["content"] = "{'city': 'Rome'}"
    turn = learnt(CALLS.replace("{{ c.function.arguments | tojson }}", each), talk)[0]
    assert "<city>Rome" in turn


@pytest.mark.parametrize("as_json", [True, False])
def test_the_one_call_of_an_older_form_is_read_alike(*, as_json: bool) -> None:
    """OpenAI's `function_call`, from before a message could have several calls."""
    one = "{% if m.function_call %}{{ m.function_call.arguments }}{% endif %}"
    one = one.replace("arguments", "arguments | tojson") if as_json else one
    template = CALLS.replace("<|im_end|>", one + "<|im_end|>")
    talk = called("{}")
    call = talk[1].pop("tool_calls")[0]["function"]
    talk[1]["function_call"] = {**call, "arguments": '{"city": "Rome", "ok": true}'}
    assert learnt(template, talk)[0] == '{"city": "Rome", "ok": true}<|im_end|>'


def test_tools_and_their_parameters_may_be_json_texts() -> None:
    function = {"name": "rain", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    as_texts = {**function, "parameters": json.dumps(function["parameters"])}
    for as_text in ([{**tools[0], "function": as_texts}], json.dumps(tools)):
        row = {"messages": TALK, "tools": as_text}
        assert document_of("messages", row, "here").tools == tools


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (
            {"messages": called('{"city": Rome}')},
            "the arguments of the call of 'rain' in message 1 are text that is no JSON",
        ),
        (
            {"messages": called("")},
            "the arguments of the call of 'rain' in message 1 are text that is no JSON",
        ),
        ({"messages": TALK, "tools": "[rain]"}, "`tools` is text that is no JSON"),
        (
            {"messages": TALK, "tools": [{"function": {"name": "rain", "parameters": "{"}}]},
            "the parameters of tool 'rain' are text that is no JSON",
        ),
        (
            {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]},
            "`weight` of message 1 is 0.5",
        ),
        (
            {"messages": [TALK[0], {**TALK[1], "train": "no"}]},
            "`train` of message 1 is 'no'",
        ),
        ({"messages": [{**TALK[0], "train": True}, TALK[1]]}, "`train` of message 0 is True"),
    ],
)
def test_what_can_not_be_read_is_refused_with_its_row(
    tmp_path: Path, row: dict[str, Any], cause: str
) -> None:
    source = write_lines(tmp_path / "t.jsonl", [{"messages": TALK, "tools": None}, row])
    (tmp_path / "calls.jinja").write_text(CALLS)
    with pytest.raises(UserError) as refused:
        prepared(str(source), tmp_path, chat_template=str(tmp_path / "calls.jinja"))
    assert cause in refused.value.cause
    assert refused.value.where.endswith("t.jsonl:2")


@pytest.mark.parametrize(
    ("template", "keys", "turns"),
    [
        (FORGETFUL, {"id": "m1"}, ["salt and rain<|im_end|>", "<think></think>sang<|im_end|>"]),
        (
            THINKING,
            {"reasoning_content": "hm"},
            ["salt and rain<|im_end|>", "<think>hm</think>sang<|im_end|>"],
        ),
        (CHATML, {"id": "m1", "name": "a"}, ["salt and rain<|im_end|>", "sang<|im_end|>"]),
        (MISTRAL, {"id": "m1"}, ["salt and rain</s>", "sang</s>"]),
    ],
)
def test_the_end_of_a_turn_is_learnt_whatever_other_keys_a_message_has(
    template: str, keys: dict[str, str], turns: list[str]
) -> None:
    talk = [{**one, **keys} if one["role"] == "assistant" else one for one in TALK]
    assert learnt(template, talk) == turns


def test_a_call_that_no_proof_finds_is_refused() -> None:
    """Not its words alone are learnt, without the call: the text ends with the number of calls."""
    count = "{{ messages | selectattr('tool_calls') | list | length }}"
    counting = FORGETFUL_CALLS + "{% if not add_generation_prompt %}" + count + "{% endif %}"
    talk = called("{}")
    talk[1]["content"] = "Let me see."
    with pytest.raises(UserError, match="does not show which tokens turn 1"):
        learnt(counting, talk)


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, MISTRAL, MARKED])
@pytest.mark.parametrize("key", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_message_of_weight_0_is_read_and_not_learnt(template: str, key: dict[str, Any]) -> None:
    """OpenAI's `weight` and `train`, of any turn; a turn with weight 1 is learnt as one without."""
    chat = ChatTemplate(template, NAMES, SPECIAL)
    text, spans = chat.spans(TALK, None, "here")
    for number, kept in ((1, spans[1:]), (3, spans[:1])):
        talk = list(TALK)
        talk[number] = {**talk[number], **key}
        assert chat.spans(talk, None, "here") == (text, kept)
    whole = [{**one, "weight": 1, "train": True} for one in TALK if one["role"] == "assistant"]
    assert chat.spans([TALK[0], whole[0], TALK[2], whole[1]], None, "here") == (text, spans)


def test_a_template_that_marks_some_turns_only_does_not_show_which_are_left_out() -> None:
    last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert learnt(last, TALK) == ["sang<|im_end|>"]
    with pytest.raises(UserError, match="marks 1 part of this conversation") as refused:
        learnt(last, [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]])
    assert refused.value.where == "rows.jsonl:7"


def test_weights_of_a_source_are_no_fault_of_its_template(tmp_path: Path) -> None:
    """Where no turn is learnt, the message says so; where one is, the others are left out."""
    (tmp_path / "chat.jinja").write_text(CHATML)
    template = str(tmp_path / "chat.jinja")
    mute = {"messages": [TALK[0], {**TALK[1], "weight": 0}]}
    source = write_lines(tmp_path / "mute.jsonl", [mute])
    with pytest.raises(UserError, match="no conversation has a turn of the assistant") as refused:
        prepared(str(source), tmp_path, chat_template=template)
    assert "weight" in refused.value.remedy
    source = write_lines(tmp_path / "half.jsonl", [mute, {"messages": TALK[2:]}])
    data = prepared(str(source), tmp_path, chat_template=template, validation=0.0)
    assert data.reference["loss_tokens"] == len("sang<|im_end|>\n")
