"""Chat templates from files: what they may use, and that nothing they ask for costs more than a second or 50 MB."""

import random

import pytest

from scripts import fuzz
from tests.support.templates import TALK, hostile
from tinychat.engine.template import MAX_SOURCE, ChatTemplate
from tinychat.errors import TinychatError


def test_functions_and_filters_that_templates_expect() -> None:
    for source, expected in {
        "{{ {'b': 'é<', 'a': [1, none]} | tojson }}": '{"b": "é<", "a": [1, null]}',
        "{{ {'a': 1} | tojson(indent=2) }}": '{\n  "a": 1\n}',
        "{{ strftime_now('%d %b %Y') | length }}": "11",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
        "{{ i }}{{ loop.length }}{{ loop.last }},{% endfor %}": "09False,19False,",
        "{{ messages | map(attribute='role') | join(',') }}": "system,user,assistant,user",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "2",
        "{{ 'a\nb' | indent(2, true) }}": "  a\n  b",
        "{{ ['a', 'b'] | join('-') ~ '-'.join(['c', 'd']) ~ 'xx'.replace('x', 'y', 1) }}": "a-bc-dyx",
        "{{ 'abcabc' | replace('b', 'x') | trim('c') }}": "axcax",
        "{{ '%s=%d' % ('a', 3) }}{{ 2 ** 10 }}{{ [1] * 3 }}": "a=31024[1, 1, 1]",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% set y %}{{ f(1) }}{% endset %}{{ y }}": "<1>",
        "{% if tools is none and x is not defined %}!{% endif %}": "!",
    }.items():
        assert ChatTemplate(source).render(messages=TALK, tools=None) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{%set ns.x=[ns.x,ns.x]%}{%endfor%}{{ns.x|tojson}}",
        "{% set b = 'x' * 1000000 %}{{ b.replace('x', b) }}",
        "{% set b = 'x' * 1000000 %}{{ ([b] * 100000) | join }}",
        "{% set b = 'x' * 1000000 %}{% for i in range(100000) %}{{ b }}{% endfor %}",
        "{% set b = 'x\n' * 500000 %}{{ b | indent(1000) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%9999999999d') }}",
        "{{ 'a'.encode() * 300000000 }}",
        "{{ '%(a)600000000d' % {'a': 5} }}",
        "{{ 5 | round(-1000000000) }}",
        "{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
        "{% set b = ['x' * 1000] * 1000 %}{% for i in range(1000) %}{{ b == b[:] }}{% endfor %}",
        "{% autoescape true %}{{ '<' * 1000000 }}{% endautoescape %}",
        "{{ [1, [2]] | sum(start=[]) }}",
        "{{ cycler('a') }}",
        "{{ self.__init__() }}",
        "{{ messages.__class__ }}{{ raise_exception.run.__globals__['os'] }}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    outcome = fuzz.guarded(
        lambda: ChatTemplate(source).render(messages=TALK), fuzz.TEMPLATE_MEMORY, fuzz.TEMPLATE_SECONDS
    )
    assert outcome.how == "refused" and "chat template failed" in outcome.text, outcome


def test_generated_hostile_templates_end_within_a_second_and_50_mb() -> None:
    outcomes = [(source, outcome) for _, source, outcome in fuzz.templates(200, 7)]
    assert [o for o in outcomes if o[1].how == "failed"] == []
    assert {o.how for _, o in outcomes} == {"answered", "refused"}
    assert hostile(random.Random("7 3")) == outcomes[3][0]  # a number of a seed is the same template for ever


def test_a_long_conversation_has_a_budget_of_its_size() -> None:
    talk = [{"role": "user", "content": "word é日 " * 2_000}] * 100
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content.split('x')[-1] | trim }}{{ '\n' }}{% endfor %}"
    assert len(ChatTemplate(loop).render(messages=talk)) > 1_500_000


def test_a_source_that_is_far_too_long() -> None:
    with pytest.raises(TinychatError, match=r"65,537 characters; at most 65,536"):
        ChatTemplate("x" * (MAX_SOURCE + 1))
