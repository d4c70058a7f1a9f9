"""Templates as public families write them render as in `transformers`, and none takes the machine."""

import tracemalloc

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from memlm.api.chat import Message
from memlm.data import template_dialect
from memlm.data.chat import ChatTemplate
from memlm.data.template_dialect import MAX_SOURCE_CHARACTERS
from memlm.errors import Incompatible, InvalidInput

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Written for these tests, each in the manner of a family: what it asks of the language, not its text.
FAMILIES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 3": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " ~ date_string + "\n\n" }}
{%- if tools is not none %}{{- tools | map(attribute='name') | join(', ') }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls is iterable and message.tool_calls|length != 1 %}
        {{- raise_exception("one call at a time") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
    {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m.role == "user" %}
        {%- if tools is not none and (m == users[-1]) %}{{- "[TOOLS]" + tools | tojson }}{%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + m.content + "[/INST]" }}
        {%- else %}{{- "[INST] " + m.content + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% for m in rest %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "phi 3": "{% for m in messages %}{{'<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "qwen 2.5": """{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{%- else %}{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}{%- endif %}
{%- for m in messages %}
    {%- if (m.role == "user") or (m.role == "system" and not loop.first) or
        (m.role == "assistant" and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "qwen 3": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "deepseek r1": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{{ raise_exception('no') }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}"
    "{%- set ns.is_tool = true %}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\n'}}{% endif %}",
    "smollm 3": """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if messages[0].role == "system" -%}{%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set mode = "/no_think" -%}
    {%- else -%}{%- set mode = "/think" -%}{%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\n## Metadata\n\nReasoning Mode: " + (mode or "/think") + "\n\n" -}}
{{- (custom if custom else "You are a helpful assistant.") + "<|im_end|>\n" -}}
{% for message in messages %}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\n"  + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}{% generation %}
        {%- if mode == "/think" -%}{{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}{{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}{% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\n"  + content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}""",
    "gpt-oss": """{%- macro param_type(spec) -%}{%- if spec is string -%}{{- spec }}{%- else -%}
    {%- for key, value in spec.items() -%}{{- key + ": " + value | string }}
    {%- if not loop.last -%}{{- " | " }}{%- endif -%}
    {%- endfor -%}{%- endif -%}{%- endmacro -%}
{%- macro system() -%}{{- "Current date: " + ("2024-%02d" | format(7)) + "\n" + param_type({"effort": "low", "n": 1}) }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}{%- set rest = messages[1:] %}
    {{- "<|start|>developer<|message|># Instructions\n\n" + messages[0].content + "\n\n<|end|>" }}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>analysis" in message.content %}{{- raise_exception("no channels") }}{%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {%- if loop.last and not add_generation_prompt %}{{- "<|return|>" }}{%- else %}{{- "<|end|>" }}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {{- "<|start|>functions.x to=assistant<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    "filters": """{% for m in messages %}{{ m | tojson(ensure_ascii=False, indent=2, sort_keys=True) }}
{{ m | tojson(separators=(',', ':')) }}{{ m.content | tojson(true) }}{{ dict(a=1, **m) | tojson(indent=1) }}
{{ m | dictsort | list }}{{ m.items() | list }}{{ dict.fromkeys([1, 2]) }}{{ m.get('x', 'none') }}{{ [m.role] * 2 }}
{{ '%s|%5.2f|%(x)s' | replace('%(x)s', 'y') | format(m.role, 2.5) }}{{ '{0:>9}{1!r}'.format(m.role, m.content) }}
{{ m.content | indent(2) | upper | capitalize | title | string | length }}
{{ m.content[1:-1] ~ 7 // 2 ~ 2 ** 5 ~ (1, 2)[0] }}
{% if loop.index > 9 %}{% break %}{% endif %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{{ loop.cycle('a', 'b') }}
{{ namespace(x=1).x }}{{ m.content.split(' ') | first | e }}
{{ ['b', 'a'] | sort | join('-') }}{{ range(3) | list | sum }}
{% endfor %}""",
}
CONVERSATIONS = {
    "one": [("user", " Hi <b>you</b>! é 猫\n")],
    "turns": [("user", "1 + 1?"), ("assistant", "<think>\nOne and one.\n</think>\n\n2"), ("user", "Sure?\n\n> 'yes'")],
    "answered": [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "<think>d</think>e")],
    "system": [("system", "Be brief. /no_think"), ("user", "x"), ("assistant", " y "), ("user", "{{ z }}")],
}


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_render_as_in_transformers(family, conversation, prompts):
    source, turns = FAMILIES[family], CONVERSATIONS[conversation]
    dicts = [{"role": role, "content": content} for role, content in turns]
    (text,), _ = render_jinja_template([dicts], chat_template=source, add_generation_prompt=prompts, **TOKENS)
    messages = [Message(role, content) for role, content in turns]
    assert ChatTemplate(source, TOKENS).render(messages, add_generation_prompt=prompts) == text


def test_a_template_knows_what_day_it_is():
    text = ChatTemplate("{{ messages[0].content }}{{ strftime_now('%Y') | length }}").render([Message("user", "in ")])
    assert text == "in 4"


SHARED_PARTS = "".join(f"{{% set a = {each} %}}" for each in ["[0]", *["[a, a]"] * 40])
OVERRUNS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "range": "{{ range(10 ** 9) | list }}",
    "product": "{{ 'x' * 10 ** 11 }}",
    "list product": "{{ ([0] * 10 ** 11) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sum": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "block": "{% set x = 'x' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "output": "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "slices": "{% set n = namespace(a=[], x='x' * 9000000) %}"
    "{% for i in range(9999) %}{% set n.a = n.a + [n.x[1:]] %}{% endfor %}",
    "pieces": "{% set n = namespace(a=[], x='x' * 9000000) %}"
    "{% for i in range(9999) %}{% set n.a = n.a + n.x.split('y') %}{% endfor %}",
    "method": "{{ 'x'.ljust(10 ** 11) }}",
    "bytes": "{{ (5).to_bytes(10 ** 11, 'big') }}",
    "filter": "{{ 'x' | center(10 ** 11) }}",
    "named": "{{ 'x' | center(width=10 ** 11) }}",
    "format": "{{ '%0999999999d' % 1 }}",
    "star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format filter": "{{ '%(a)999999999d' | format(a=1) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10 ** 6) }}",
    "format map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "replace": "{% set x = 'x' * 1000000 %}{{ x.replace('x', x) | length }}",
    "replace filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) | length }}",
    "join": "{% set x = 'x' * 1000000 %}{{ x.join(x) | length }}",
    "join filter": "{% set x = 'x' * 1000000 %}{{ x | join(x) | length }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000, true) | length }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000) | length }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'x' * 1000000}) | length }}",
    "json": "{{ (range(99999) | list) | tojson(indent=100000) | length }}",
    "shared parts": SHARED_PARTS + "{{ a }}",
    "equal parts": SHARED_PARTS + SHARED_PARTS.replace("a", "b") + "{{ a == b }}",
    "hashed parts": SHARED_PARTS.replace("[", "(").replace("]", ",)") + "{{ {a: 1} }}",
    "batch": "{{ [1] | batch(10 ** 11, 'x') | list }}",
    "round": "{{ 5 | round(10 ** 11, 'ceil') }}",
}


@pytest.mark.parametrize("name", OVERRUNS)
def test_a_template_takes_neither_the_time_nor_the_memory_of_the_machine(name, monkeypatch):
    monkeypatch.setattr(template_dialect, "MAX_CPU_S", 0.5)
    template = ChatTemplate("{{ messages[0].content }}" + OVERRUNS[name])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="refuses the messages"):
            template.render([Message("user", "hi")])
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_a_long_conversation_is_no_overrun():
    turns = [Message(("user", "assistant")[n % 2], f"{n} " + "word\n" * 200) for n in range(1001)]
    for family in ("mistral", "qwen 3", "deepseek r1"):
        template = ChatTemplate(FAMILIES[family], TOKENS)
        assert "1000 word" in template.render(turns)


@pytest.mark.parametrize(
    "source",
    [
        "x" * (MAX_SOURCE_CHARACTERS + 1), "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for i in [] %}" * 60,
        "{% for i in [1] %}" * 60 + "{% endfor %}" * 60, "{{" * 60_000, "{% generation %}", "{{ 1 | nothing }}",
    ],
)  # fmt: skip
def test_a_source_that_is_too_much_to_compile_is_refused(source):
    with pytest.raises(Incompatible, match="no Jinja template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(__html__=1) }}", "{% set n = namespace() %}{% set n._x = 1 %}", "{{ tick.__globals__ }}",
        "{{ raise_exception.__globals__.x }}", "{{ dict.update(messages[0], {'content': ''}) }}",
        "{{ ('' | attr('__class__')).x }}", "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ self.__init__.__globals__ }}", "{% include messages[0].content %}", "{% import 'os' as os %}",
    ],
)  # fmt: skip
def test_the_sandbox_holds(source):
    with pytest.raises(InvalidInput, match="refuses the messages"):
        ChatTemplate("{{ messages[0].content }}" + source).render([Message("user", "hi")])
