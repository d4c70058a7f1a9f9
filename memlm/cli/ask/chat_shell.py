"""The shell of `memlm chat`: reads lines, streams answers, and runs commands that begin with a slash."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from memlm.api.generation import FinishReason, Token
from memlm.api.handles import TokenStream
from memlm.api.passages import AnswerPrompt, Passage, check_num_passages
from memlm.base.printable import one_line
from memlm.base.progress import silent
from memlm.cli.ask.chat_memory import ChatMemory, note_id
from memlm.cli.ask.conversation import Conversation
from memlm.cli.store.render import print_passages
from memlm.cli.terminal import render
from memlm.cli.terminal.console import ConsoleProgress, emit_json, err, out, print_problem
from memlm.errors import InvalidInput, MemlmError

PROMPT = "> "
HISTORY_LINES = 1000
COMMANDS = {
    "/sources": ("", "where the last answer came from"),
    "/passages": ("N|auto", "passages for the next answers; 0: none; auto: those about the question"),
    "/remember": ("TEXT", "add a text to the datastore; the next answer uses it"),
    "/add": ("FILE", "add a file or folder to the datastore"),
    "/forget": ("ID", "delete a document from the datastore"),
    "/system": ("TEXT", "set the system message; without TEXT, show it"),
    "/reset": ("", "begin a new conversation"),
    "/help": ("", "list the commands"),
    "/exit": ("", "leave; so do /quit and Ctrl-D"),
}


class ChatShell:
    """One conversation at a terminal or a pipe. No error of a turn ends it."""

    def __init__(self, conversation: Conversation, memory: ChatMemory, *, json: bool) -> None:
        self._conversation, self._memory, self._json = conversation, memory, json
        self._options = conversation.options
        self._last: list[Token] = []
        self._prompt: AnswerPrompt | None = None  # of the last answer, if it has passages
        self._has_left = False
        self.num_failed = 0
        self._run: dict[str, Callable[[str], None]] = {
            "/sources": self._show_sources,
            "/passages": self._set_passages,
            "/remember": self._remember,
            "/add": self._add,
            "/forget": self._forget,
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": self._help,
            "/exit": self._leave,
            "/quit": self._leave,
        }

    def run(self, lines: Iterator[str]) -> None:
        """Answers lines until they end, or `/exit`."""
        for line in lines:
            if line := line.strip():
                self._guarded(line)
            if self._has_left:
                return

    def _guarded(self, line: str) -> None:
        """Answers one line. Whatever goes wrong is one line on standard error."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            else:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        except KeyboardInterrupt:
            err.print("stopped", style="dim")
        except (BrokenPipeError, SystemExit):
            raise
        except Exception as error:  # a bug ends an answer, not a conversation
            self.num_failed += 1
            kind = "" if isinstance(error, MemlmError | OSError) else f"{type(error).__name__}: "
            err.print(f"memlm: {one_line(kind + str(error))}", markup=False)

    def _answer(self, text: str) -> None:
        seen, was_stopped = list[Token](), False
        self._conversation.options = self._memory.usable(self._options)
        stream = self._conversation.ask(text)
        try:
            if self._json:
                seen.extend(stream)
            else:
                render.print_sentence(stream.accepted.prompt)
                render.stream(stream, colored=True, into=seen)
        except KeyboardInterrupt:
            was_stopped = True
            out.print()  # what follows gets its own line
        except BaseException:
            self._conversation.take_back()
            raise
        finally:
            stream.close()
        self._last, self._prompt = seen, stream.accepted.prompt
        answer = "".join(token.text for token in seen)
        self._conversation.keep(answer)
        self._close_answer(answer, stream, was_stopped=was_stopped)

    def _close_answer(self, answer: str, stream: TokenStream, *, was_stopped: bool) -> None:
        """Prints the JSON of an answer, or on a terminal the line under it."""
        finished = stream.finished
        if self._json:
            ending = {"finished": finished, "stopped": was_stopped}
            emit_json({"text": answer, **ending, "passages": self._passages, "sources": self._sources()})
            return
        if self._prompt is not None:
            render.print_places(self._prompt)
        render.warn_if_partial(finished.usage.searched_share if finished else None)
        if out.is_terminal:
            usage = finished.usage if finished else None
            parts = [render.summary(self._last, usage, stream.accepted)] if self._last else []
            if was_stopped:
                parts.append("stopped")
            elif not self._last:
                parts.append("the model ended its turn without a word")
            elif finished is not None and finished.reason is FinishReason.LENGTH:
                parts.append("cut off by --max-tokens, or by the context")
            out.print(" · ".join(parts), style="dim", markup=False)

    @property
    def _passages(self) -> tuple[Passage, ...]:
        """The passages that the last answer was asked from."""
        return () if self._prompt is None else self._prompt.passages

    def _sources(self) -> list[dict[str, Any]]:
        """The documents of the last answer with their shares, the largest first."""
        shares = render.probability_by_document(self._last).most_common()
        return [{"document_id": name, "share": share / len(self._last)} for name, share in shares if share]

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._run:
            raise InvalidInput(f"there is no {name}; /help lists the commands, and // begins a message with a slash")
        if name in COMMANDS and COMMANDS[name][0] and name != "/system" and not rest.strip():
            raise InvalidInput(f"{name} needs {COMMANDS[name][0]}: {name} {COMMANDS[name][0]}")
        self._run[name](rest.strip())

    def _say(self, text: str, **fields: Any) -> None:
        """Prints the outcome of a command, or its fields as JSON."""
        if self._json:
            emit_json(fields)
        else:
            out.print(one_line(text), style="dim", markup=False)

    def _show_sources(self, _: str) -> None:
        if not self._last:
            raise InvalidInput("there is no answer yet; ask something first")
        if self._json:
            emit_json({"passages": self._passages, "sources": self._sources()})
        elif self._passages:
            print_passages(self._passages, json=False)
        elif self._memory.stores():
            render.print_sources(self._last)
        else:
            out.print("the model alone: no datastore is loaded", style="dim")

    def _set_passages(self, number: str) -> None:
        if number != "auto" and not number.isdecimal():
            raise InvalidInput(f"/passages {number} is no number of passages; give one, 0 for none, or auto")
        wanted = None if number == "auto" else int(number)
        check_num_passages(wanted)
        self._options = {**self._options, "num_passages": wanted}
        self._say(f"passages for the next answers: {number}", num_passages=wanted)

    def _remember(self, text: str) -> None:
        begin_s, document_id = time.monotonic(), note_id()
        store = self._memory.remember(document_id, text)
        seconds = time.monotonic() - begin_s
        self._say(f"remembered as {document_id} in {store} ({seconds:.1f} s)", remembered=document_id, store=store)

    def _add(self, path: str) -> None:
        from memlm.data.corpus import Corpus

        begin_s, corpus = time.monotonic(), Corpus([Path(path).expanduser()], on_problem=print_problem)
        ids = [document.id for document in corpus]
        with ConsoleProgress() if out.is_terminal else nullcontext(silent) as progress:
            store = self._memory.add(corpus, progress)
        listed = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
        seconds = time.monotonic() - begin_s
        self._say(f"added {listed} to {store} ({seconds:.1f} s)", added=ids, store=store)

    def _forget(self, document_id: str) -> None:
        store = self._memory.delete(document_id)
        text = f"deleted {document_id} from {store}; answers about it stay in this conversation until /reset"
        self._say(text, forgot=document_id, store=store)

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        shown = self._conversation.system or "the template's own"
        self._say(f"system message: {shown}", system=self._conversation.system)

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._last, self._prompt = [], None
        self._say("a new conversation", reset=True)

    def _help(self, _: str) -> None:
        if self._json:
            emit_json({"commands": {name: about for name, (_, about) in COMMANDS.items()}})
            return
        for name, (argument, about) in COMMANDS.items():
            out.print(f"  {name + ' ' + argument:17}  {about}", markup=False)
        out.print("  Anything else is a message. Ctrl-C stops an answer.")

    def _leave(self, _: str) -> None:
        self._has_left = True


def piped_lines(*, echo: bool) -> Iterator[str]:
    """The lines of standard input without its byte order mark, with U+FFFD where they are not UTF-8. With `echo`, they
    stand before the answers.
    """
    for number, data in enumerate(sys.stdin.buffer):
        line = data.decode("utf-8" if number else "utf-8-sig", errors="replace")
        if echo and line.strip():
            out.print(PROMPT + one_line(line.strip()), style="dim", markup=False)
        yield line


def typed_lines() -> Iterator[str]:
    """Lines from a terminal, with editing, completion of commands, and a history that outlives the shell."""
    save_history = _edit_lines()
    try:
        while True:
            try:
                yield input(PROMPT)
            except KeyboardInterrupt:
                out.print("\n(Ctrl-D leaves)", style="dim")
            except UnicodeDecodeError:
                err.print("memlm: that was no UTF-8; type it again")
            except EOFError:
                out.print()
                return
    finally:
        save_history()


def history_file() -> Path:
    """Where the lines that were typed are kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "memlm" / "chat_history"


def _edit_lines() -> Callable[[], None]:
    """Switches line editing on, where there is a readline. Returns what saves the history."""
    try:
        import readline
    except ImportError:
        return lambda: None
    path = history_file()
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)

    def complete(text: str, number: int) -> str | None:
        found = [f"{name} " for name in COMMANDS if name.startswith(text)] if text.startswith("/") else []
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")

    def save() -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)

    return save
