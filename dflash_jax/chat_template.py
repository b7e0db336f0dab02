"""Render a model's chat template, which is a program from an untrusted file.

Jinja's immutable sandbox runs it: no private attributes, no changes to its inputs, no files. The
environment is the one that templates are written for (Hugging Face transformers): trimmed blocks,
`break` and `continue`, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, and the
`generation` block, which marks the assistant's text and here only renders its body. The sandbox
does not limit time or memory: a hostile template can still be slow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from dflash_jax.config import ConfigError


class _Refused(TemplateError):
    """What the template itself raised."""


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A template and the special tokens it may name (`bos_token`, `eos_token`, ...).

    source: the file it came from, for errors. Compiled on first use, so that a model with a broken
    template can still be used without it.
    """

    def __init__(self, text: str, source: str, special: Mapping[str, str]):
        self.text, self.source, self.special = text, source, dict(special)
        self._compiled: Any = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of `messages`. variables: whatever else the template reads (`tools`,
        `enable_thinking`, ...). ConfigError when the template is broken, is stopped by the sandbox
        or refuses the messages."""
        inputs: dict[str, Any] = {"tools": None, "documents": None, **self.special, **variables}
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.text)
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **inputs
            )
        except _Refused as error:
            raise ConfigError(f"{self.source}: the chat template refused the messages: {error}") from None
        except SecurityError as error:
            raise ConfigError(f"{self.source}: the chat template is not safe to run: {error}") from None
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.source}: the chat template does not compile (line {error.lineno}): {error.message}"
            ) from None
        except Exception as error:  # the template's own arithmetic can raise anything
            raise ConfigError(
                f"{self.source}: the chat template failed: {type(error).__name__}: {error}"
            ) from None
