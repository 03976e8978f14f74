"""What of a schema that is not strict is not held is told in the log, once."""

import logging

from agentserve.server.http.answer_form import Form
from agentserve.server.http.reply_parsers import ReplyGrammars
from tests.grammar_rig import compiler_of_bytes
from tools_bridge.compile_process import MOST_LISTED
from tools_bridge.registry import DEFAULT_FORM

MANY = {f"a\n{n}": {"type": "array", "uniqueItems": True} for n in range(MOST_LISTED + 5)}


def test_what_is_left_out_is_logged_once_in_one_line(caplog):
    grammars = ReplyGrammars(compiler_of_bytes(), DEFAULT_FORM)
    form = Form(json=True, schema={"type": "object", "properties": MANY}, strict_schema=False)
    with caplog.at_level(logging.INFO):
        grammars.compile(grammars.source(form, ""))
        grammars.compile(grammars.source(form, ""))
        grammars.compile(grammars.source(Form(json=True, schema={"type": "object"}, strict_schema=False), ""))
    [line] = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert r"schema.properties.a\n0: 'uniqueItems'" in line
    assert line.endswith(", and 5 more")
