"""Several turns on one state: what was said is in the caches and is not read again.

The conversation is a list of tokens, and the model's answers stay the tokens that it emitted: text that
is encoded again may come out as others. A turn adds what the chat template puts between an answer and
the next one, and the caches grow by that. Where a template rewrites earlier turns, the whole
conversation is read again.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from dflash_jax.config import ConfigError
from dflash_jax.state import RoundState
from infer.session import Completion, OnText, Session
from infer.settings import Settings
from infer.text import counted

_log = logging.getLogger(__name__)

# Stands for an answer while the template is asked what follows one. From a private range of Unicode, so
# that no template looks for it.
_ANSWER = "\ue000answer\ue000"


@dataclass(frozen=True)
class _Said:
    """A conversation so far: messages for the template, tokens as the model saw and emitted them, and
    the state that holds (at least the first) of these tokens."""

    messages: tuple[dict[str, str], ...]
    tokens: list[int]
    state: RoundState | None = None


class Chat:
    """A conversation. A turn that fails or is interrupted leaves it as it was."""

    def __init__(self, session: Session, settings: Settings = Settings(), system: str | None = None):  # noqa: B008
        if not session.pair.target.tokenizer.has_template:
            raise ConfigError(
                f"{session.pair.target.source} has no chat template: use `generate --raw` instead"
            )
        self.session, self.settings, self.system = session, settings, system
        self.reset()

    def reset(self) -> None:
        messages = () if self.system is None else ({"role": "system", "content": self.system},)
        self._said = _Said(messages, [])

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation, as the model saw and emitted them."""
        return list(self._said.tokens)

    def say(self, text: str, on_text: OnText | None = None) -> Completion:
        """The answer to the next user turn."""
        if not text:
            raise ConfigError("the message is empty")
        said = self._said
        messages = (*said.messages, {"role": "user", "content": text})
        following = self._following(messages) if said.tokens else None
        if following is None:
            tokens = self.session.pair.target.tokenizer.chat(messages)
            new, state = tokens, None
        else:
            tokens = said.tokens + following
            # the state may lag behind: what it does not hold yet is read with the new turn
            held = 0 if said.state is None else int(said.state.target_cache.length[0]) + 1
            new, state = tokens[held:], said.state
        run = self.session.run([new], self.settings, after=state, on_text=on_text)
        answer = run.completions[0]
        messages = (*messages, {"role": "assistant", "content": answer.text})
        self._said = _Said(messages, tokens + answer.tokens, run.state)
        return answer

    def _following(self, messages: tuple[dict[str, str], ...]) -> list[int] | None:
        """The tokens between the last answer and the one to come; None when they cannot be told apart
        from the rest of the conversation."""
        words = self.session.pair.target.tokenizer
        *earlier, answered, asked = messages
        before = words.render(earlier)
        whole = words.render([*earlier, {**answered, "content": _ANSWER}, asked])
        head, found, tail = whole.partition(_ANSWER)
        # The last answer's own end of turn is among its tokens.
        last = self._said.tokens[-1]
        end = words.decode([last], skip_special=False) if last in words.stop_ids else ""
        if not found or head != before or not tail.startswith(end) or tail == end:
            _log.warning("the conversation is read again: its chat template does not just append a turn")
            return None
        return words.encode(tail.removeprefix(end))


def converse(chat: Chat, prompt: str = "> ") -> None:
    """Turns from standard input until it ends. /reset forgets the conversation, /quit leaves."""
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/quit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/") and " " not in text:  # a path with a question behind it is a message
            print(f"{text} is not a command: /reset begins a new conversation, /quit leaves", file=sys.stderr)
        elif text:
            _turn(chat, text)


def _turn(chat: Chat, text: str) -> None:
    try:
        answer = chat.say(text, lambda _, new: print(new, end="", flush=True))
    except ConfigError as error:  # a full context, for one: say so and let the user go on
        print(f"error: {error} (/reset begins a new conversation)", file=sys.stderr)
        return
    except KeyboardInterrupt:
        print("\n(interrupted: this turn is forgotten)", file=sys.stderr)
        return
    print(flush=True)
    speed = answer.tokens_per_second
    print(
        f"[{counted(len(answer.tokens), 'token')}, {answer.finish_reason}"
        + (f", {speed:.1f} tokens/s" if speed else "")
        + (f", {answer.stats.tau:.2f} per round" if answer.mode != "ar" and answer.stats.sizes else "")
        + "]",
        file=sys.stderr,
    )
