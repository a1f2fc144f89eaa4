# ruff: noqa: E501  (templates are long lines)
"""Chat templates of families, written anew from what theirs print, with their markers and the pieces that train, marked by hand.

Each prints a conversation as the family's own does: header, text, end of turn, prompt for an answer, thinking of earlier turns
kept or dropped, tool calls. Long texts that stand in front of conversations (dates, instructions for tools) are cut short.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from framework.data.chat import Chat


@dataclass(frozen=True)
class ChatFamily:
    """A template. end: what ends an answer. lead: what an answer begins with where nothing is thought. trims: blanks around what
    is said are dropped. keeps: an answer stands in later turns as it was, so that one document trains all turns."""

    template: str
    end: str
    lead: str = ""
    trims: bool = False
    keeps: bool = True
    special: dict[str, str] = field(default_factory=dict)
    thought: str | None = None
    """An answer with thinking, of {thought} and {said}; None where the template drops it."""
    called: str | None = None
    """A call of add with {"a": 1, "b": "two"}; None where the template has no calls."""
    takes_system: bool = True


CHATML = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
)
HERMES = (
    "{%- for c in m.tool_calls or [] -%}{{- ('\n' if m.content or not loop.first) ~ '<tool_call>\n{\"name\": \"' ~ c.function.name ~"
    " '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' -}}{%- endfor -%}"
)
SPLIT = (
    "{%- set said = m.content -%}{%- set thought = m.reasoning_content or '' -%}{%- if '</think>' in said and not thought -%}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
)
ALTERNATE = (
    "{%- for m in messages if m.role != 'system' -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('roles must alternate') -}}{%- endif -%}{%- endfor -%}"
)
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call>'

FAMILIES = {
    "chatml": ChatFamily(CHATML, "<|im_end|>"),
    "llama3_1": ChatFamily(
        "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n' -}}"
        "{%- if messages and messages[0].role == 'system' -%}{{- messages[0].content | trim -}}{%- set messages = messages[1:] -%}{%- endif -%}"
        "{{- '<|eot_id|>' -}}{%- for m in messages -%}{%- if m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}"
        "{{- raise_exception('single tool-calls only') -}}{%- endif -%}{%- set f = m.tool_calls[0].function -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"' ~ f.name ~ '\", \"parameters\": ' ~ (f.arguments | tojson) ~"
        " '}<|eot_id|>' -}}{%- else -%}{{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~"
        " '<|end_header_id|>\n\n' ~ (m.content | trim) ~ '<|eot_id|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}",
        "<|eot_id|>",
        trims=True,
        special={"bos_token": "<|begin_of_text|>"},
        called='{"name": "add", "parameters": {"a": 1, "b": "two"}}<|eot_id|>',
    ),
    "qwen2_5": ChatFamily(
        "{%- if messages and messages[0].role != 'system' -%}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' -}}"
        "{{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>' if m.role == 'tool' else m.content -}}"
        + HERMES
        + "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
        "<|im_end|>",
        called=TOOL_CALL + "<|im_end|>",
    ),
    "qwen3": ChatFamily(
        LAST_USER + "{%- for m in messages -%}" + SPLIT + "{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' -}}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}"
        "{{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ said.lstrip('\n') -}}{%- else -%}{{- said -}}{%- endif -%}"
        + HERMES
        + "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
        "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}",
        "<|im_end|>",
        lead="<think>\n\n</think>\n\n",
        keeps=False,
        thought="<think>\n{thought}\n</think>\n\n{said}<|im_end|>",
        called="<think>\n\n</think>\n\n" + TOOL_CALL + "<|im_end|>",
    ),
    "qwen3_5": ChatFamily(  # thinks always: the prompt begins it
        LAST_USER + "{%- for m in messages -%}" + SPLIT + "{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' -}}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}{{- '<think>\n' ~ thought.strip() ~ '\n</think>\n\n' -}}{%- endif -%}"
        "{{- said.strip() -}}"
        + HERMES
        + "{{- '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}",
        "<|im_end|>",
        lead="\n</think>\n\n",
        trims=True,
        keeps=False,
        thought="{thought}\n</think>\n\n{said}<|im_end|>",
        called="\n</think>\n\n" + TOOL_CALL + "<|im_end|>",
    ),
    "gemma2": ChatFamily(
        ALTERNATE
        + "{{- bos_token -}}{%- if messages and messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (m.content | trim) ~"
        " '<end_of_turn>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}",
        "<end_of_turn>",
        trims=True,
        special={"bos_token": "<bos>"},
        takes_system=False,
    ),
    "gemma3": ChatFamily(
        ALTERNATE
        + "{{- bos_token -}}{%- set first = '' -%}{%- if messages and messages[0].role == 'system' -%}{%- set first = messages[0].content ~ '\n\n' -%}"
        "{%- set messages = messages[1:] -%}{%- endif -%}{%- for m in messages -%}{{- '<start_of_turn>' ~ ('model' if m.role =="
        " 'assistant' else m.role) ~ '\n' ~ (first if loop.first else '') ~ (m.content | trim) ~ '<end_of_turn>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}",
        "<end_of_turn>",
        trims=True,
        special={"bos_token": "<bos>"},
    ),
    "gpt_oss": ChatFamily(
        "{{- '<|start|>system<|message|>Current date: ' ~ strftime_now('%Y-%m-%d') ~ '<|end|>' -}}{%- for m in messages -%}"
        "{%- if m.role == 'assistant' and m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}{%- if m.thinking -%}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}"
        "{{- '<|start|>assistant to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' ~ (f.arguments | tojson) ~ '<|call|>' -}}"
        "{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt -%}{%- if m.thinking -%}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' -}}{%- elif m.role == 'assistant' -%}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' -}}{%- elif m.role == 'tool' -%}"
        "{{- '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' ~ (m.content | tojson) ~ '<|end|>' -}}{%- else -%}"
        "{{- '<|start|>' ~ ('developer' if m.role == 'system' else m.role) ~ '<|message|>' ~ m.content ~ '<|end|>' -}}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}",
        "<|return|>",
        lead="<|channel|>final<|message|>",
        keeps=False,
        thought="<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{said}<|return|>",
        called=' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "two"}<|call|>',
    ),
    "deepseek_v3": ChatFamily(
        "{{- bos_token -}}{%- for m in messages if m.role == 'system' -%}{{- m.content -}}{%- endfor -%}{%- set ns = namespace(tool=false) -%}"
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.tool = false -%}{{- '<｜User｜>' ~ m.content -}}"
        "{%- elif m.role == 'assistant' and m.tool_calls -%}{{- '<｜Assistant｜>' + m.content + '<｜tool▁calls▁begin｜>' -}}"
        "{%- for c in m.tool_calls -%}{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' +"
        " c.function.arguments + '\n```<｜tool▁call▁end｜>' -}}{%- endfor -%}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}"
        "{%- elif m.role == 'assistant' -%}{{- ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content +"
        " '<｜end▁of▁sentence｜>' -}}{%- set ns.tool = false -%}{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}"
        "{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if ns.tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- elif add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}",
        "<｜end▁of▁sentence｜>",
        special={"bos_token": "<｜begin▁of▁sentence｜>"},
        called=(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": "two"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        ),
    ),
    "deepseek_r1": ChatFamily(  # prompts with <think>, and writes no thinking
        "{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}"
        "{%- elif m.role == 'assistant' -%}{{- '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' -}}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\n' -}}{%- endif -%}",
        "<｜end▁of▁sentence｜>",
        special={"bos_token": "<｜begin▁of▁sentence｜>"},
    ),
    "mistral": ChatFamily(
        "{{- bos_token -}}"
        "{%- for m in messages -%}{%- if m.role == 'system' -%}{{- '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' -}}"
        "{%- elif m.role == 'user' -%}{{- '[INST]' ~ m.content ~ '[/INST]' -}}{%- elif m.role == 'tool' -%}"
        "{{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' -}}{%- elif m.tool_calls -%}{{- '[TOOL_CALLS]' -}}"
        "{%- for c in m.tool_calls -%}{{- c.function.name ~ '[ARGS]' ~ (c.function.arguments | tojson) -}}{%- endfor -%}{{- eos_token -}}"
        "{%- else -%}{{- m.content ~ eos_token -}}{%- endif -%}{%- endfor -%}",
        "</s>",
        special={"bos_token": "<s>", "eos_token": "</s>"},
        called='[TOOL_CALLS]add[ARGS]{"a": 1, "b": "two"}</s>',
    ),
    "phi4": ChatFamily(
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}",
        "<|im_end|>",
    ),
    "phi4_mini": ChatFamily(  # closes the last turn of all with the end of a text, too
        "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- eos_token -}}{%- endif -%}",
        "<|end|>",
        special={"eos_token": "<|endoftext|>"},
    ),
    "smollm3": ChatFamily(
        "{{- '<|im_start|>system\nToday Date: ' ~ strftime_now('%d %B %Y') ~ '\nReasoning Mode: /think\n' -}}"
        "{%- if messages and messages[0].role == 'system' -%}{{- messages[0].content -}}{%- set messages = messages[1:] -%}{%- endif -%}"
        "{{- '<|im_end|>\n' -}}{%- for m in messages -%}{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' ~"
        " m.content.lstrip('\n') ~ '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
        "<|im_end|>",
    ),
    "olmo2": ChatFamily(
        "{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '<|assistant|>\n' ~ m.content ~ eos_token ~"
        " ('' if loop.last else '\n') -}}{%- else -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '\n' -}}{%- endif -%}"
        "{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}{%- endfor -%}",
        "<|endoftext|>",
        special={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "granite": ChatFamily(
        "{%- for m in messages -%}{{- '<|start_of_role|>' ~ m.role ~ '<|end_of_role|>' ~ m.content ~ '<|end_of_text|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}",
        "<|end_of_text|>",
    ),
    "glm4_5": ChatFamily(  # nothing ends a turn but what begins the next one
        LAST_USER + "{{- '[gMASK]<sop>' -}}{%- for m in messages -%}" + SPLIT + "{%- if m.role == 'assistant' -%}{{- '<|assistant|>\n<think>' ~"
        " (thought.strip() if loop.index0 > ns.last else '') ~ '</think>' -}}{%- if said.strip() -%}{{- '\n' ~ said.strip() -}}{%- endif -%}"
        "{%- for c in m.tool_calls or [] -%}{{- '\n<tool_call>' ~ c.function.name ~ '\n' -}}{%- for k, v in c.function.arguments.items() -%}"
        "{{- '<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ v ~ '</arg_value>\n' -}}{%- endfor -%}{{- '</tool_call>' -}}{%- endfor -%}"
        "{%- else -%}{{- '<|' ~ ('observation' if m.role == 'tool' else m.role) ~ '|>\n' ~ m.content -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}",
        "<|user|>",
        lead="\n<think></think>\n",
        trims=True,
        thought="\n<think>{thought}</think>\n{said}<|user|>",
        called=(
            "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>two</arg_value>\n</tool_call><|observation|>"
        ),
    ),
    "kimi_k2": ChatFamily(
        "{%- for m in messages -%}{{- '<|im_' ~ ('system' if m.role == 'tool' else m.role) ~ '|>' ~ m.role ~ '<|im_middle|>' ~ m.content -}}"
        "{%- if m.tool_calls -%}{{- '<|tool_calls_section_begin|>' -}}{%- for c in m.tool_calls -%}{{- '<|tool_call_begin|>functions.' ~"
        " c.function.name ~ ':0<|tool_call_argument_begin|>' ~ (c.function.arguments | tojson) ~ '<|tool_call_end|>' -}}{%- endfor -%}"
        "{{- '<|tool_calls_section_end|>' -}}{%- endif -%}{{- '<|im_end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}",
        "<|im_end|>",
        called=(
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": "two"}'
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        ),
    ),
    "minimax_m2": ChatFamily(  # prompts with <think>, drops the thinking of earlier turns
        LAST_USER + "{%- for m in messages -%}" + SPLIT + "{{- ']~b]' ~ ('ai' if m.role == 'assistant' else m.role) ~ '\n' -}}"
        "{%- if m.role == 'assistant' and thought and loop.index0 > ns.last -%}{{- '<think>\n' ~ thought ~ '\n</think>\n\n' -}}{%- endif -%}"
        "{{- said ~ '[e~[\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- ']~b]ai\n<think>\n' -}}{%- endif -%}",
        "[e~[",
        thought="{thought}\n</think>\n\n{said}[e~[",
    ),
    "cohere": ChatFamily(
        ALTERNATE
        + "{{- bos_token -}}{%- for m in messages -%}{{- '<|START_OF_TURN_TOKEN|><|' ~ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] ~"
        " '_TOKEN|>' ~ m.content.strip() ~ '<|END_OF_TURN_TOKEN|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}",
        "<|END_OF_TURN_TOKEN|>",
        trims=True,
        special={"bos_token": "<BOS_TOKEN>"},
    ),
    "llama4": ChatFamily(
        "{{- bos_token -}}{%- for m in messages -%}{{- '<|header_start|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|header_end|>\n\n' ~"
        " (m.content | trim) -}}{%- for c in m.tool_calls or [] -%}{{- '<|python_start|>{\"name\": \"' ~ c.function.name ~ '\", \"parameters\": ' ~"
        " (c.function.arguments | tojson) ~ '}<|python_end|>' -}}{%- endfor -%}{{- '<|eot|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|header_start|>assistant<|header_end|>\n\n' -}}{%- endif -%}",
        "<|eot|>",
        trims=True,
        special={"bos_token": "<|begin_of_text|>"},
        called='<|python_start|>{"name": "add", "parameters": {"a": 1, "b": "two"}}<|python_end|><|eot|>',
    ),
    "llama2": ChatFamily(  # a blank on either side of an answer
        ALTERNATE
        + "{%- set first = '' -%}{%- if messages and messages[0].role == 'system' -%}{%- set first = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' -%}"
        "{%- set messages = messages[1:] -%}{%- endif -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{{- bos_token ~ '[INST] ' ~"
        " (first if loop.first else '') ~ m.content.strip() ~ ' [/INST]' -}}{%- else -%}{{- ' ' ~ m.content.strip() ~ ' ' ~ eos_token -}}"
        "{%- endif -%}{%- endfor -%}",
        " </s>",
        lead=" ",
        trims=True,
        special={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "mistral_v1": ChatFamily(
        "{%- if messages and messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
        + ALTERNATE
        + "{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'user' -%}{{- ' [INST] ' ~ m.content ~ ' [/INST]' -}}"
        "{%- else -%}{{- ' ' ~ m.content ~ eos_token -}}{%- endif -%}{%- endfor -%}",
        "</s>",
        lead=" ",
        special={"bos_token": "<s>", "eos_token": "</s>"},
        takes_system=False,
    ),
    "zephyr": ChatFamily(
        "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ eos_token ~ '\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}",
        "</s>",
        special={"eos_token": "</s>"},
    ),
    "phi3": ChatFamily(
        "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}",
        "<|end|>",
        special={"eos_token": "<|endoftext|>"},
    ),
    "qwen3_coder": ChatFamily(  # calls as tags, a line for each value
        "{%- for m in messages -%}{{- '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' ~ m.content -}}"
        "{%- for c in m.tool_calls or [] -%}{{- ('\n' if m.content or not loop.first) ~ '<tool_call>\n<function=' ~ c.function.name ~ '>\n' -}}"
        "{%- for k, v in c.function.arguments.items() -%}{{- '<parameter=' ~ k ~ '>\n' ~ v ~ '\n</parameter>\n' -}}{%- endfor -%}"
        "{{- '</function>\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
        "<|im_end|>",
        called=(
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n</function>\n</tool_call><|im_end|>"
        ),
    ),
    "gemma4": ChatFamily(  # prompts with an empty channel of thoughts, which stands before no answer
        "{{- bos_token -}}{%- for m in messages -%}{{- '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (m.content | trim) -}}"
        "{%- for c in m.tool_calls or [] -%}{{- '<|tool_call>call:' ~ c.function.name ~ '{' -}}{%- for k, v in c.function.arguments.items() -%}"
        "{{- (',' if not loop.first) ~ k ~ ':' ~ ('<|\"|>' ~ v ~ '<|\"|>' if v is string else v) -}}{%- endfor -%}{{- '}<tool_call|>' -}}{%- endfor -%}"
        "{{- '<turn|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|turn>model\n<|channel>thought\n<channel|>' -}}{%- endif -%}",
        "<turn|>",
        trims=True,
        special={"bos_token": "<bos>"},
        called='<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|><turn|>',
    ),
    "glm5": ChatFamily(  # as glm4_5 without line breaks; the prompt begins to think
        LAST_USER + "{{- '[gMASK]<sop>' -}}{%- for m in messages -%}" + SPLIT + "{%- if m.role == 'assistant' -%}{{- '<|assistant|><think>' ~"
        " (thought.strip() if loop.index0 > ns.last else '') ~ '</think>' ~ said.strip() -}}"
        "{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' ~ c.function.name -}}{%- for k, v in c.function.arguments.items() -%}"
        "{{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ v ~ '</arg_value>' -}}{%- endfor -%}{{- '</tool_call>' -}}{%- endfor -%}"
        "{%- elif m.role == 'tool' -%}{{- '<|observation|><tool_response>' ~ m.content ~ '</tool_response>' -}}"
        "{%- else -%}{{- '<|' ~ m.role ~ '|>' ~ m.content -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}",
        "<|user|>",
        lead="</think>",
        trims=True,
        thought="{thought}</think>{said}<|user|>",
        called=(
            "</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>two</arg_value></tool_call>"
            "<|observation|>"
        ),
    ),
    "deepseek_v3_1": ChatFamily(  # closes thinking in the prompt
        "{{- bos_token -}}{%- for m in messages if m.role == 'system' -%}{{- m.content -}}{%- endfor -%}{%- set ns = namespace(tool=false) -%}"
        "{%- for m in messages if m.role != 'system' -%}{%- if m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}{%- elif m.role == 'tool' -%}"
        "{{- '<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>' -}}{%- else -%}{{- ('' if ns.tool else '<｜Assistant｜></think>') ~ m.content -}}"
        "{%- if m.tool_calls -%}{{- '<｜tool▁calls▁begin｜>' -}}{%- for c in m.tool_calls -%}{{- '<｜tool▁call▁begin｜>' ~ c.function.name ~ '<｜tool▁sep｜>' ~"
        " (c.function.arguments | tojson) ~ '<｜tool▁call▁end｜>' -}}{%- endfor -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}{{- '<｜end▁of▁sentence｜>' -}}"
        "{%- endif -%}{%- set ns.tool = m.role == 'tool' -%}{%- endfor -%}"
        "{%- if add_generation_prompt and not ns.tool -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}",
        "<｜end▁of▁sentence｜>",
        special={"bos_token": "<｜begin▁of▁sentence｜>"},
        called=(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "two"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        ),
    ),
    "olmo3": ChatFamily(  # the last turn ends with the end of a text, others with that of a turn
        "{%- if messages and messages[0].role != 'system' -%}{{- '<|im_start|>system\nYou are Olmo.<|im_end|>\n' -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content -}}{%- if m.role == 'assistant' and loop.last and not"
        " add_generation_prompt -%}{{- eos_token -}}{%- else -%}{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
        "<|endoftext|>",
        keeps=False,
        special={"eos_token": "<|endoftext|>"},
    ),
    "granite4": ChatFamily(
        "{%- for m in messages -%}{{- '<|start_of_role|>' ~ ('user' if m.role == 'tool' else m.role) ~ '<|end_of_role|>' -}}"
        "{{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>' if m.role == 'tool' else m.content -}}"
        + HERMES
        + "{{- '<|end_of_text|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}",
        "<|end_of_text|>",
        called=TOOL_CALL + "<|end_of_text|>",
    ),
    "kimi_k2_thinking": ChatFamily(
        LAST_USER + "{%- for m in messages -%}" + SPLIT + "{{- '<|im_' ~ ('system' if m.role == 'tool' else m.role) ~ '|>' ~ m.role ~ '<|im_middle|>' -}}"
        "{%- if m.role == 'assistant' -%}{{- '<think>' ~ (thought if loop.index0 > ns.last else '') ~ '</think>' -}}{%- endif -%}{{- said -}}"
        "{%- if m.tool_calls -%}{{- '<|tool_calls_section_begin|>' -}}{%- for c in m.tool_calls -%}{{- '<|tool_call_begin|>functions.' ~"
        " c.function.name ~ ':0<|tool_call_argument_begin|>' ~ (c.function.arguments | tojson) ~ '<|tool_call_end|>' -}}{%- endfor -%}"
        "{{- '<|tool_calls_section_end|>' -}}{%- endif -%}{{- '<|im_end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}",
        "<|im_end|>",
        lead="<think></think>",
        thought="<think>{thought}</think>{said}<|im_end|>",
        called=(
            '<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": "two"}'
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        ),
    ),
    "minimax_text": ChatFamily(
        "{%- for m in messages -%}{{- '<beginning_of_sentence>' ~ {'user': 'user name=user', 'assistant': 'ai name=assistant', 'system':"
        " 'system ai_setting=assistant'}[m.role] ~ '\n' ~ m.content ~ '<end_of_sentence>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<beginning_of_sentence>ai name=assistant\n' -}}{%- endif -%}",
        "<end_of_sentence>",
    ),
    "command_a": ChatFamily(
        "{{- bos_token -}}{%- for m in messages -%}{{- '<|START_OF_TURN_TOKEN|>' -}}{%- if m.role == 'assistant' -%}"
        "{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' ~ m.content ~ '<|END_RESPONSE|>' -}}{%- else -%}{{- {'user': '<|USER_TOKEN|>', 'system':"
        " '<|SYSTEM_TOKEN|>'}[m.role] ~ m.content -}}{%- endif -%}{{- '<|END_OF_TURN_TOKEN|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        lead="<|START_RESPONSE|>",
        special={"bos_token": "<BOS_TOKEN>"},
    ),
}  # fmt: skip

MARKERS = re.compile(
    r"<[|｜][^<>'\" ~\n]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS)\]|\[(?:TOOL_CALLS|ARGS|gMASK)\]"
    r"|<sop>|</?think>|</?tool_call>|\]~b\]|\[e~\[|<\|(?:turn|channel|tool_call)>|<(?:turn|channel|tool_call)\|>"
    r"|<(?:beginning|end)_of_sentence>"
)
TEXT = "user assistant system hello there how are you what is the answer to this question one two three"


@cache
def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the markers of a family's template, as its own tokenizer has them."""
    family = FAMILIES[name]
    markers = [*MARKERS.findall(family.template), *family.special.values(), family.end]
    markers += [
        f"<|{role}|>"
        for role in ("user", "assistant", "system", "observation")
        if f"<|{role}|>" in (family.end, "<|user|>")
    ]
    eos = family.special.get("eos_token", "<eos>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(dict.fromkeys([*markers, *(f"<|{role}|>" for role in ("observation", "assistant")), eos])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"bos_token": "<BOS>", "eos_token": eos} | family.special)
    )
    built.chat_template = family.template
    return built


def build_chat(name: str, train_on: str = "assistant") -> Chat:
    return Chat(build_tokenizer(name), train_on)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def read_trained(chat: Chat, encoded: list[Any]) -> list[list[str]]:
    """The trained pieces of each document, decoded."""
    return [[text for text, trained in chat.read_runs(*each) if trained] for each in encoded]
