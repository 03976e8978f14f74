import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools_bridge.deltas import ArgumentsDelta, CallClosed, CallOpened, ContentDelta, Parsed, PartialCall
from tools_bridge.json_value import parse_arguments
from tools_bridge.registry import DEFAULT_FORM

NASTY = [
    "</tool_call>",
    "<tool_call>",
    "}",
    "]}}",
    '"',
    "\\",
    '\\"',
    "a\nb",
    "<|im_end|>",
    "é😀",
    "{[",
    "\u2028",
    '</tool_call>\n<tool_call>{"name": "x"}',
]


def parse(text, final=True):
    """What `text` holds; if not `final`, without what only more text can decide."""
    parser = DEFAULT_FORM.parser()
    parser.feed(text)
    if final:
        parser.finish()
    return parser.parsed


def call(name, arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def done(name, arguments):
    return PartialCall(name, arguments, complete=True)


def join(deltas):
    """What a client makes of the deltas; asserts their order on the way."""
    content, calls = "", []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                content += text
            case CallOpened(index, name):
                assert index == len(calls)
                calls.append([name, "", None])
            case ArgumentsDelta(index, text):
                assert index == len(calls) - 1
                assert calls[index][2] is None
                calls[index][1] += text
            case CallClosed(index, error):
                assert calls[index][2] is None
                calls[index][2] = error
    assert all(error is not None for _, _, error in calls)
    return content, [PartialCall(n, a, e == "", e) for n, a, e in calls]


def stream(pieces):
    tracker = DEFAULT_FORM.parser()
    deltas = [delta for piece in pieces for delta in tracker.feed(piece)]
    deltas += tracker.finish()
    return join(deltas), tracker.parsed


def check_all_cuts(text):
    whole = parse(text)
    wanted = (whole.content, list(whole.calls))
    cuts = [[text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 7)]
    cuts += [[text[:i], text[i:]] for i in range(len(text) + 1)]
    for pieces in cuts:
        joined, parsed = stream(pieces)
        assert joined == wanted, pieces
        assert parsed == whole, pieces
    return whole


@pytest.mark.parametrize("nasty", NASTY)
def test_nothing_in_an_argument_string_cuts_the_call(nasty):
    arguments = {"text": nasty, nasty: [nasty, {"k": nasty}]}
    whole = check_all_cuts("Sure. " + call("f", arguments) + " ok")
    assert whole.content == "Sure.  ok"
    assert [c.complete for c in whole.calls] == [True]
    assert json.loads(whole.calls[0].arguments) == arguments


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "  "}', "{}"),
        ('{"name": "f", "arguments": "{}"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"arguments": null, "name": "f"}', "{}"),
        (r'{"name": "f", "arguments": "{\"a\": \"\\u00e9\\n\"}"}', r'{"a": "\u00e9\n"}'),
        ('{"id": "7", "name": "f", "x": [{"y": "}"}, 1.5e3, true], "arguments": {"a": 1}}', '{"a": 1}'),
        ('  {\n"name" :\t"f" ,"arguments": {"a":\n1}\n}  ', '{"a":\n1}'),
        (r'{"n\u0061me": "\u0066", "arguments": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_forms_of_arguments(body, arguments):
    whole = check_all_cuts(f"<tool_call>{body}</tool_call>")
    assert whole == Parsed("", (done("f", arguments),))


def test_empty_arguments_are_streamed_exactly_once():
    tracker = DEFAULT_FORM.parser()
    deltas = [d for char in '<tool_call>{"name": "f"}</tool_call>' for d in tracker.feed(char)]
    assert deltas == [CallOpened(0, "f"), ArgumentsDelta(0, "{}"), CallClosed(0, "")]
    assert tracker.finish() == []


def test_arguments_come_as_they_are_written():
    tracker = DEFAULT_FORM.parser()
    assert tracker.feed('<tool_call>{"name": "f", "argu') == [CallOpened(0, "f")]
    assert tracker.feed('ments": {"a": "x') == [ArgumentsDelta(0, '{"a": "x')]
    assert tracker.feed("y\\") == [ArgumentsDelta(0, "y")]
    assert tracker.feed('"z"}') == [ArgumentsDelta(0, '\\"z"}')]
    assert tracker.feed("}\n</tool_call>") == [CallClosed(0, "")]


def test_several_calls_and_text_around_them():
    text = "One.\n\n" + call("f", {"a": 1}) + "\n" + call("g", {}) + "\n\nTwo.\n"
    assert check_all_cuts(text) == Parsed("One.\n\n\n\n\nTwo.\n", (done("f", '{"a": 1}'), done("g", "{}")))
    assert check_all_cuts("\n" + call("f", {}) + "\n").content == ""


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", " a\n", "a < b <tool", "<tool_cal", "<tool_call", "</tool_call>", "<tool_call<tool_"],
)
def test_text_without_calls_is_left_alone(text):
    assert check_all_cuts(text) == Parsed(text, ())


@pytest.mark.parametrize(
    "text",
    [
        "use the <tool_call> tag",
        '<tool_call>{"nom": 1}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        r'<tool_call>{"name": "\ud800"}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"a": }',
        '<tool_call>{"a": [1}',
        "<tool_call>{,}",
        '<tool_call>{"a" "b"}',
        r'<tool_call>{"\x": 1}',
    ],
)
def test_what_is_no_call_is_text_and_nothing_is_lost(text):
    assert check_all_cuts(text) == Parsed(text, ())


def test_a_call_after_something_that_was_no_call():
    whole = check_all_cuts("the <tool_call> tag: " + call("f", {"a": 1}))
    assert whole == Parsed("the <tool_call> tag:", (done("f", '{"a": 1}'),))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}}}',
        '{"name": "f", "arguments": {"a": 1}} {"name": "g"}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": tru}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1]}}',
        '{"name": "f", "arguments": {"a": 1',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "no json"}',
        r'{"name": "f", "arguments": "\ud800"}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": {}, "arguments": {}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f", x}',
        '{"name": "f", "x": nope}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": -1e999}}',
        '{"name": "f", "arguments": "{\\"a\\": 1e999}"}',
        '{"name": "f", "arguments": {"a": ' + "[" * 64 + "]" * 64 + "}}",
        r'{"name": "f", "arguments": {"a": "\ud800"}}',
        '{"name": "f", "arguments": ' + '{"a":' * 20000 + "1" + "}" * 20000 + "}",
    ],
)
def test_a_malformed_call_is_flagged_and_not_repaired(body):
    text = f"<tool_call>{body}</tool_call>then" + call("ok", {})
    whole = parse(text) if len(text) > 1000 else check_all_cuts(text)
    assert [(c.name, c.complete, c.error) for c in whole.calls] == [
        ("f", False, "malformed"),
        ("ok", True, ""),
    ]
    assert whole.content == "then"


def test_every_proper_beginning_of_a_call_is_truncated_or_text():
    text = call("f", {"a": "x", "b": {"c": [1, 2]}})
    ends = text.index("\n</tool_call>")
    for n in range(len("<tool_call>"), ends):
        whole = parse(text[:n])
        assert whole.truncated, n
        assert not any(c.complete for c in whole.calls)
        assert whole.content == ("" if whole.calls else text[:n])
        assert whole.cut == (not whole.calls)
        for c in whole.calls:
            assert json.dumps({"a": "x", "b": {"c": [1, 2]}}).startswith(c.arguments)
    for n in range(ends, len(text)):  # the object is whole: only its closing tag is missing
        assert parse(text[:n]) == parse(text)
        assert not parse(text[:n]).truncated


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>", "<tool_call>"),
        ('<tool_call>\n{"na', '<tool_call>\n{"na'),
        ('Well, <tool_call>{"name": "f', 'Well, <tool_call>{"name": "f'),
        (call("f", {}) + '\n<tool_call> {"arguments": {"a": 1', '<tool_call> {"arguments": {"a": 1'),
    ],
)
def test_a_call_that_ends_before_its_name_is_shown_as_text(text, content):
    whole = check_all_cuts(text)
    assert whole.content == content
    assert whole.truncated


def test_a_forgotten_closing_tag():
    one = '<tool_call>{"name": "f"}'
    assert check_all_cuts(one + one) == Parsed("", (done("f", "{}"), done("f", "{}")))
    assert check_all_cuts(one + " and so on") == Parsed("and so on", (done("f", "{}"),))


def test_a_beginning_holds_only_what_is_decided():
    text = "Hi. " + call("f", {"a": "</tool_call>"}) + " Bye"
    whole = parse(text)
    for n in range(len(text) + 1):
        part = parse(text[:n], final=False)
        assert whole.content.startswith(part.content)
        assert len(part.calls) <= len(whole.calls)
        assert all(
            p.name == w.name and w.arguments.startswith(p.arguments)
            for p, w in zip(part.calls, whole.calls, strict=False)
        )


def test_no_text_after_the_end():
    tracker = DEFAULT_FORM.parser()
    tracker.finish()
    with pytest.raises(RuntimeError):
        tracker.feed("x")


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "f"',
        ', "arguments": ',
        '{"a": ',
        "}",
        '"',
        "\\",
        " ",
        "\n",
        "1",
        "null",
        "[",
        "]",
        ",",
        ":",
        "x",
        "<",
        '"arguments"',
        '"name"',
        '"g"',
        "\\u00e9",
        "\\ud83d",
        "true",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=25), st.data())
def test_any_text_parses_the_same_at_any_cut(fragments, data):
    text = "".join(fragments)
    whole = parse(text)
    size = data.draw(st.sampled_from([1, 2, 3, 7]))
    joined, parsed = stream([text[i : i + size] for i in range(0, len(text), size)])
    assert joined == (whole.content, list(whole.calls))
    assert parsed == whole
    if "<tool_call>" not in text:
        assert whole == Parsed(text, ())
    for c in whole.calls:
        assert c.complete == (c.error == "")
        assert not c.complete or isinstance(parse_arguments(c.arguments), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3), st.booleans(), st.integers(1, 9))
def test_calls_round_trip(all_arguments, ascii_only, size):
    text = "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
        + "\n</tool_call>"
        for arguments in all_arguments
    )
    (content, calls), _ = stream([text[i : i + size] for i in range(0, len(text), size)])
    assert content == ""
    assert all(c.complete for c in calls)
    assert [json.loads(c.arguments) for c in calls] == all_arguments
