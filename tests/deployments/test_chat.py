"""`carousel chat` against the real API over scripted models, and in a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.child_process import PROJECT
from app.engine.request import Request
from app.text import ReasoningMarks, Tokenizer
from deployments import chat
from tests.benchmarks.servers import serving, told_server
from tests.kit.service import WAIT, Script, Service, Step, entry, say
from tests.waiting import eventually


@pytest.fixture
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What is piped in; nothing at first."""

    def pipe(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("latin-1")), encoding="utf-8"))

    pipe("")
    return pipe


def prompt(service: Service) -> str:
    """What the model was asked last."""
    ids = service.generate.requests[-1].prompt_token_ids
    return service.tokenizer.decode(ids)


def test_one_message_is_answered(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5."))
    with serving(service.app) as url:
        assert chat.main(["Count from 3 to 5.", "--url", f"{url}/v1/", "--system", "Be brief.", "--seed", "7"]) == 0
    assert capsys.readouterr().out == "3 4 5.\n"
    assert "Be brief." in prompt(service)
    assert "Count from 3 to 5." in prompt(service)
    assert service.request.sampling.seed == 7


def test_what_is_piped_in_is_a_message_or_follows_it(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], piped: Callable[[str], None]
) -> None:
    service = Service(tokenizer, say(tokenizer, "1 2 3 4 5."))
    with serving(service.app) as url:
        piped("Count\nto 5.")
        assert chat.main(["--url", url]) == 0
        assert prompt(service).endswith("Count\nto 5.")
        piped("Count\nto 5.")
        assert chat.main(["Do this:", "--url", url]) == 0
        assert prompt(service).endswith("Do this:\n\nCount\nto 5.")
        assert capsys.readouterr().out == "1 2 3 4 5.\n" * 2
        assert chat.main(["--url", url]) == 1
        assert "there is no message" in capsys.readouterr().err
        piped("\xff\xfe")
        assert chat.main(["--url", url]) == 1
        assert "is not valid UTF-8" in capsys.readouterr().err


def test_what_could_command_the_terminal_is_left_out(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(tokenizer, say(tokenizer, "red \x1b[31m\x07 and\n\tmore\x9b2J\n"))
    with serving(service.app) as url:
        assert chat.main(["Hi", "--url", url]) == 0
        assert capsys.readouterr().out == "red [31m and\n\tmore2J\n"
        assert chat.main(["Hi", "--url", url, "--model", "\x1b]0;owned\x07"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_what_goes_wrong_is_one_sentence(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        assert chat.main(["Hi", "--url", url, *arguments]) == 1
        told = capsys.readouterr()
        assert told.out == ""
        return told.err

    service = Service(tokenizer, say(tokenizer, "1"), keys=[entry("sk-1")])
    with serving(service.app) as url:
        assert said() == (
            "401: an API key is required; send it in the header `Authorization: Bearer <key>`. `carousel chat` sends "
            "the key in the environment variable CAROUSEL_API_KEY\n"
        )
        monkeypatch.setenv("CAROUSEL_API_KEY", "sk-1\r\n")  # as a file of Windows has it
        assert said("--model", "other").startswith("404: there is no model 'other'")
        assert said("--temperature", "9").startswith("400: temperature should be less than or equal to 2")
        monkeypatch.setenv("CAROUSEL_API_KEY", "sk-sécret\rX")
        assert "CAROUSEL_API_KEY contains characters that no key contains" in (told := said())
        assert "cret" not in told
        monkeypatch.setenv("CAROUSEL_API_KEY", "")
    assert said() == (
        f"no service responds at {url} ([Errno 111] Connection refused); start one with `carousel serve`, or pass its "
        f"address with --url\n"
    )
    url = "localhost"
    assert "unknown url type" in said()
    with serving(told_server(lambda _: Response())) as url:
        assert said().startswith("404: ")
    with serving(answering(Response("<html>"))) as url:
        assert "is not a compatible server" in said()
    with serving(answering(JSONResponse({"data": []}))) as url:
        assert "has no models" in said()


def answering(models: Response) -> Starlette:
    """A server whose only page are its models, and which answers a chat with the beginning of a stream."""

    async def list_models(_: object) -> Response:
        return models

    async def begin(_: object) -> Response:
        return Response('data: {"choices": [{"delta": {"content": "It is"}}]}\n\n', media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/models", list_models), Route("/v1/chat/completions", begin, methods=["POST"])])


def test_a_stream_without_an_end_is_no_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering(JSONResponse({"data": [{"id": "demo"}]}))) as url:
        assert chat.main(["Hi", "--url", url]) == 1
    assert capsys.readouterr() == ("It is\n", "the answer was interrupted\n")


def test_an_error_amid_the_stream_is_told_below_what_came(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tokenizer.encode("1 2", add_special_tokens=False)

    def script(_: Request) -> Iterable[Step]:
        yield from ((each,) for each in ids)
        raise RuntimeError("broken")

    with serving(Service(tokenizer, script).app) as url:
        assert chat.main(["Hi", "--url", url]) == 1
    told = capsys.readouterr()
    assert told.out == "1 2\n"
    assert "broken" not in told.err
    assert told.err.count("\n") == 1


MARKS = ReasoningMarks("<think>", "</think>", ())


def test_reasoning_is_no_part_of_what_another_program_gets(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(tokenizer, say(tokenizer, "<think>2 and 2</think>4."), reasoning_marks=MARKS)
    with serving(service.app) as url:
        assert chat.main(["2 + 2?", "--url", url]) == 0
    assert capsys.readouterr().out == "4.\n"


def test_a_reader_that_has_read_enough_ends_it_silently(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "1 2 3\n" * 20))
    with serving(service.app) as url:
        command = f"{sys.executable} -m deployments.cli chat --url {url} Hi < /dev/null | head -n 1"
        done = subprocess.run(command, shell=True, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1 2 3\n", "")


def endless(tokenizer: Tokenizer, text: str) -> Script:
    """Says the text, and then nothing more until its client hangs up."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return lambda request: [*((each,) for each in ids), WAIT]


def test_ctrl_c_ends_one_answer_with_its_own_status(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, endless(tokenizer, "1 2 3"))
    with serving(service.app) as url:
        command = [sys.executable, "-m", "deployments.cli", "chat", "--url", url, "Hi"]
        asking = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert asking.stdout is not None
        assert asking.stdout.read(5) == "1 2 3"
        asking.send_signal(signal.SIGINT)
        assert asking.communicate() == ("\n", None)
    assert asking.returncode == 130


ANSWERED = "the first after"  # of the line below an answer


class Terminal:
    """A chat in a pseudo-terminal: what it prints is read, and keys are sent."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        code = "import sys; from deployments.cli import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "chat", "--url", url],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=PROJECT, env=os.environ | {"TERM": "dumb"},
            start_new_session=True, preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, words: str) -> str:
        """What was printed, up to these words."""
        printed = ""
        while words not in printed:
            printed += os.read(self._ours, 1).decode(errors="replace")
        return printed

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _take_terminal(descriptor: int) -> None:
    """Have Ctrl-C in it reach this process."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(url: str) -> Iterator[Terminal]:
    opened = Terminal(url)
    try:
        yield opened
    finally:
        opened.close()


def test_a_chat_remembers_and_obeys_its_commands(tokenizer: Tokenizer) -> None:
    scripts = {"demo": say(tokenizer, "3 4."), "other": say(tokenizer, "5 6.")}
    service = Service(tokenizer, names=("demo", "other"), scripts=scripts)
    with serving(service.app) as url, terminal(url) as chatting:
        assert "Chat with demo" in chatting.until("Use /model to switch models: demo, other. /help lists the commands.")
        chatting.until(">>> ")
        chatting.type("First\n")
        assert "3 4." in chatting.until(ANSWERED)
        chatting.until(">>> ")
        chatting.type('"""Second\n')
        chatting.until("... ")
        chatting.type('line"""\n')
        chatting.until(">>> ")
        assert all(each in prompt(service) for each in ("First", "3 4.", "Second\nline"))
        chatting.type("/model third\n")
        chatting.until("There is no such model. The service has demo, other.")
        chatting.type("/model other\n/system Be kind.\nThird\n")
        assert "5 6." in chatting.until(ANSWERED)
        assert "Be kind." in prompt(service)
        assert "First" not in prompt(service)
        chatting.type("/clear\nFourth\n")
        chatting.until(ANSWERED)
        chatting.until(">>> ")
        assert "Third" not in prompt(service)
        assert "Be kind." in prompt(service)
        chatting.type("/help\n")
        assert "/exit" in chatting.until(">>> ")
        chatting.type("\x04")
        assert chatting.process.wait() == 0


def test_ctrl_c_stops_an_answer_and_keeps_what_came(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, endless(tokenizer, "1 2 3"))
    with serving(service.app) as url, terminal(url) as chatting:
        chatting.until(">>> ")
        chatting.type("Count.\n")
        chatting.until("1 2 3")
        chatting.type("\x03")
        chatting.until("[stopped]")
        eventually(lambda: not service.generate.open)
        chatting.until(">>> ")
        chatting.type("Go on.\n")
        chatting.until("1 2 3")
        assert "1 2 3" in prompt(service)
        assert "stopped" not in prompt(service)
        chatting.type("\x03")
        chatting.until(">>> ")

        def has_ended() -> bool:
            chatting.type("\x03")  # one that comes just before `input` waits for keys is seen at the next key
            return chatting.process.poll() is not None

        eventually(has_ended, every_s=0.1)
        assert chatting.process.returncode == 0


def test_reasoning_is_dim_and_not_sent_again(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "<think>2 and 2</think>4."), reasoning_marks=MARKS)
    with serving(service.app) as url, terminal(url) as chatting:
        chatting.until(">>> ")
        chatting.type("2 + 2?\n")
        assert "\x1b[2m2 and 2\x1b[0m\r\n4." in chatting.until(ANSWERED)
        chatting.until(">>> ")
        chatting.type("Sure?\n")
        chatting.until(ANSWERED)
        assert "2 and 2" not in prompt(service)
