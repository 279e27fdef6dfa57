"""Chat templates in the shapes in which families of models publish them, cut to what calls and reasoning need."""

from __future__ import annotations

# Qwen3.5 begins reasoning at the end of the prompt. Qwen3-Coder and Nemotron 3 write calls in the same way.
QWEN3_5 = r"""
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nReply in this form:\n\n<tool_call>\n<function=example_function_name>\n' }}
    {{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content|trim + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- endif %}
        {{- '<|im_start|>assistant\n<think>\n' + reasoning_content|trim + '\n</think>\n\n' + message.content|trim }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
                {%- if loop.first and not message.content|trim %}
                    {{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}
                {%- else %}
                    {{- '\n\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
                {%- endif %}
                {%- if tool_call.arguments is defined %}
                    {%- for args_name, args_value in tool_call.arguments|items %}
                        {{- '<parameter=' + args_name + '>\n' }}
                        {%- if args_value is mapping or (args_value is sequence and args_value is not string) %}
                            {{- args_value | tojson | safe }}
                        {%- else %}
                            {{- args_value | string }}
                        {%- endif %}
                        {{- '\n</parameter>\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}"""

# LFM2 shows tools and their results, and has no place for calls.
LFM2 = r"""
{{- bos_token -}}
{%- set ns = namespace(system_prompt="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + "List of tools: <|tool_list_start|>[" -%}
    {%- for tool in tools -%}
        {%- set ns.system_prompt = ns.system_prompt + (tool | tojson) + (", " if not loop.last else "") -%}
    {%- endfor -%}
    {%- set ns.system_prompt = ns.system_prompt + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- "<|im_start|>system\n" + ns.system_prompt + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\n" -}}
    {%- set content = message["content"] -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- endif -%}
    {{- content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""

# LFM2.5 writes calls itself.
LFM2_5 = r"""
{{- bos_token -}}
{%- macro format_arg_value(arg_value) -%}
    {%- if arg_value is string -%}{{- "'" + arg_value + "'" -}}
    {%- elif arg_value is mapping -%}{{- arg_value | tojson -}}
    {%- else -%}{{- arg_value | string -}}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}{{- "<|im_start|>system\nList of tools: " + (tools | tojson) + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\n" -}}
    {%- set content = message.content -%}
    {%- if "</think>" in content -%}{%- set content = content.split("</think>")[-1] | trim -%}{%- endif -%}
    {{- content -}}
    {%- if message.tool_calls is defined -%}
        {%- set ns = namespace(tool_calls=[]) -%}
        {%- for tool_call in message.tool_calls -%}
            {%- set args_ns = namespace(arg_strings=[]) -%}
            {%- for arg_name, arg_value in tool_call["function"]["arguments"].items() -%}
                {%- set args_ns.arg_strings = args_ns.arg_strings + [arg_name + "=" + format_arg_value(arg_value)] -%}
            {%- endfor -%}
            {%- set call = tool_call["function"]["name"] + "(" + (args_ns.arg_strings | join(", ")) + ")" -%}
            {%- set ns.tool_calls = ns.tool_calls + [call] -%}
        {%- endfor -%}
        {{- "<|tool_call_start|>[" + (ns.tool_calls | join(", ")) + "]<|tool_call_end|>" -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}"""

# Granite 3 tells in a system message of its own how calls are written, and writes none.
GRANITE_3 = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You are Granite, developed by IBM." %}
    {%- if tools %}
        {%- set system_message = system_message + " When a tool is required to answer the user's query, respond only "
            + "with <|tool_call|> followed by a JSON list of tools used." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

GRANITE_4 = r"""
{%- if tools %}
    {{- '<|start_of_role|>system<|end_of_role|>You may call these tools:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|end_of_text|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + message.content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and message.content) or not loop.first %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end_of_text|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_of_role|>user<|end_of_role|>\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|end_of_text|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

# Mistral Small 3.1 and earlier.
MISTRAL_LIST = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message["tool_calls"] is defined and message["tool_calls"] is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message["tool_calls"] %}
            {%- set out = tool_call["function"]|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call["id"] is defined or tool_call["id"]|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call["id"] + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Mistral Small 3.2.
MISTRAL_CALL_ID = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message["tool_calls"] is defined and message["tool_calls"] %}
        {%- for tool_call in message["tool_calls"] %}
            {{- "[TOOL_CALLS]" + tool_call["function"]["name"] + "[CALL_ID]" + tool_call["id"] + "[ARGS]" }}
            {{- tool_call["function"]["arguments"] | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Ministral 3 and Magistral 1.2.
MINISTRAL_3 = r"""
{{- bos_token }}
{%- if tools is defined and tools is not none and tools|length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- elif message['content'] | length > 0 %}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] == 'thinking' %}{{- '[THINK]' + block['thinking'] + '[/THINK]' }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] | length > 0 %}
            {%- for tool in message['tool_calls'] %}
                {%- set arguments = tool['function']['arguments'] %}
                {%- if arguments is not string %}{%- set arguments = arguments|tojson|safe %}
                {%- elif arguments == '' %}{%- set arguments = '{}' %}{%- endif %}
                {{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

NEMOTRON_NANO_2 = r"""
{{- '<SPECIAL_10>System\n' }}
{%- if tools -%}
    {{- '<AVAILABLE_TOOLS>' + (tools | tojson) + '</AVAILABLE_TOOLS>\n\n' -}}
    {{- '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>\n\n' -}}
{%- endif -%}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'user' -%}
        {{- '<SPECIAL_11>User\n' + content.strip() + '\n' }}
    {%- elif message['role'] == 'tool' -%}
        {{- '<SPECIAL_11>User\n<TOOL_RESPONSE>[' + content + ']</TOOL_RESPONSE>\n\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[1].strip() %}{%- endif -%}
        {{- '<SPECIAL_11>Assistant\n' + content.strip() }}
        {%- if message.tool_calls -%}
            {%- if content.strip() != '' -%}{{- '\n\n' -}}{%- endif -%}
            {{- '<TOOLCALL>[' -}}
            {%- for call in message.tool_calls -%}
                {%- set fn = call.function if call.function is defined else call -%}
                {{- '{"name": "' + fn.name + '", "arguments": ' -}}
                {{- fn.arguments if fn.arguments is string else fn.arguments | tojson -}}
                {{- '}' + (', ' if not loop.last else '') -}}
            {%- endfor -%}
            {{- ']</TOOLCALL>' -}}
        {%- endif -%}
        {{- '\n<SPECIAL_12>\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<SPECIAL_11>Assistant\n<think>\n\n' -}}{%- endif -%}"""

GEMMA_4 = r"""
{%- macro format_argument(argument) -%}
    {%- if argument is string -%}
        {{- '<|"|>' + argument + '<|"|>' -}}
    {%- elif argument is boolean -%}
        {{- 'true' if argument else 'false' -}}
    {%- elif argument is mapping -%}
        {{- '{' -}}
        {%- for key, value in argument | dictsort -%}
            {{- key -}}:{{- format_argument(value) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif argument is sequence -%}
        {{- '[' -}}
        {%- for item in argument -%}{{- format_argument(item) -}}{%- if not loop.last %},{% endif -%}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- argument -}}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if (enable_thinking is defined and enable_thinking) or tools -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}
    {%- if tools -%}{%- for tool in tools %}{{- '<|tool>' + (tool | tojson) + '<tool|>' -}}{%- endfor %}{%- endif -%}
    {{- '<turn|>\n' -}}
{%- endif %}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\n' }}
    {%- if message['tool_calls'] -%}
        {%- for tool_call in message['tool_calls'] -%}
            {%- set function = tool_call['function'] -%}
            {{- '<|tool_call>call:' + function['name'] + '{' -}}
            {%- if function['arguments'] is mapping -%}
                {%- for key, value in function['arguments'] | dictsort -%}
                    {{- key -}}:{{- format_argument(value) -}}{%- if not loop.last %},{% endif -%}
                {%- endfor -%}
            {%- elif function['arguments'] is string -%}
                {{- function['arguments'] -}}
            {%- endif -%}
            {{- '}<tool_call|>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- message['content'] | trim -}}
    {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\n' -}}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""
