"""`pagedattn generate` and `pagedattn chat`: the engine's text on a terminal or in a pipe, and what stops them."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch
from processes import environment

from pagedattn.cli import command as cli
from pagedattn.cli import generate
from pagedattn.engine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "examples" / "tiny-qwen3")
GREEDY = SamplingParams(temperature=0, max_tokens=12)
FEW = ("--max-tokens", "12", "--device", "cpu")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, device="cpu")


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The engine of the module in place of one per command, where a command asks for no other settings."""
    real = generate._llm
    monkeypatch.setattr(
        generate, "_llm", lambda engine, args: real(engine, args) if args.set or args.model != MODEL else llm
    )


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    return out, err


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_one_prompt_is_streamed(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("A block table", GREEDY, progress=False)[0].text
    assert expected and run(capsys, "generate", MODEL, "A block table", *FEW) == (f"{expected}\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("A block table"))
    assert run(capsys, "generate", MODEL, "-", *FEW) == (f"{expected}\n", "")
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *args, **_: pieces.extend(args))
    assert cli.main(("generate", MODEL, "A block table", *FEW)) == 0
    assert len(pieces) == 12 and "".join(pieces) == expected


def test_several_prompts_keep_their_order(llm: LLM, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = ["The scheduler", "A block table"]
    expected = [one.text for one in llm.generate(texts, GREEDY, progress=False)]
    out, _ = run(capsys, "generate", MODEL, *texts, *FEW)
    assert out == f"> {texts[0]}\n{expected[0]}\n\n> {texts[1]}\n{expected[1]}\n"
    spread = ("generate", "--max-tokens", "12", MODEL, texts[0], "--device", "cpu", texts[1])
    assert run(capsys, *spread)[0] == out == run(capsys, "generate", MODEL, *FEW, *texts)[0]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([texts[1], "", ""]), encoding="utf-8")
    told = json.loads(run(capsys, "generate", MODEL, texts[0], "--file", str(file), *FEW, "--json")[0])
    assert [one["prompt"] for one in told["outputs"]] == texts and told["model"] == MODEL
    assert [one["text"] for one in told["outputs"]] == expected
    assert {one["finish_reason"] for one in told["outputs"]} == {"length"}
    assert [len(one["token_ids"]) for one in told["outputs"]] == [12, 12] and told["seconds"] > 0


def test_sampling_and_engine_options_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ("generate", MODEL, "The", *FEW, "--temperature", "5", "--seed", "7", "--top-k", "50")
    one, two = (run(capsys, *sampled)[0] for _ in range(2))
    assert one == two != run(capsys, "generate", MODEL, "The", *FEW)[0]
    out, _ = run(capsys, "generate", MODEL, "A block table", "--stop", "kernel", *FEW, "--json")
    assert json.loads(out)["outputs"][0]["text"] == " tells the "
    out, err = run(capsys, "generate", MODEL, "A block table " * 5, "--set", "max_model_len=8", *FEW, status=1)
    assert not out and err.startswith("pagedattn: prompt 0: prompt must have 1 to 7 tokens")


def test_what_follows_two_dashes_is_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(run(capsys, "generate", MODEL, "--json", *FEW, "A", "--", "-B", "--", "--json")[0])
    assert [one["prompt"] for one in told["outputs"]] == ["A", "-B", "--", "--json"]
    told = json.loads(run(capsys, "generate", MODEL, "--json", *FEW, "--", "-B")[0])
    assert [one["prompt"] for one in told["outputs"]] == ["-B"]


@pytest.mark.parametrize("name", ["fp64", "float64"])
def test_a_dtype_has_two_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = cli._parsed(["generate", MODEL, "x", "--dtype", name])
    assert parsed.dtype == "float64" and cli._parsed(["generate", MODEL, "x", "--dtype", "auto"]).dtype == "auto"
    assert cli._parsed(["conformance", "TORCH", "--dtype", name, "--dtype", "bf16"]).dtype == [
        torch.float64,
        torch.bfloat16,
    ]


@pytest.mark.parametrize("redirect", ["", ">&-"])
def test_output_that_cannot_be_encoded_or_goes_nowhere(redirect: str) -> None:
    words = [sys.executable, "-m", "pagedattn", "generate", MODEL, "über", "x", "--max-tokens", "2", "--device", "cpu"]
    command = f"{shlex.join(words)} {redirect}".encode()  # whatever the locale of the tests is
    variables = environment(PYTHONUTF8="1", PYTHONIOENCODING="ascii")
    done = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("> ?ber\n") != bool(redirect)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith("pagedattn ") and out.split()[1][0].isdigit()


def test_where_a_backend_is_looked_for_is_said_where_its_module_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    known = run(capsys, "conformance", "pagedattn.spec:Nope", status=1)[1]
    assert "has no attribute 'Nope'" in known and "PYTHONPATH" not in known
    assert "is it on PYTHONPATH?" in run(capsys, "conformance", "no_such_module.inside:Nope", status=1)[1]


def test_a_conversation_in_a_pipe(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"role": "user", "content": "What is a slot?"}
    answer = llm.chat([first], GREEDY).text
    later = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And a block?"}]
    second = llm.chat(later, GREEDY).text
    say(monkeypatch, "What is a slot?", "", "And a block?", "/reset", "What is a slot?", "/exit", "unheard")
    assert run(capsys, "chat", MODEL, *FEW)[0] == f"{answer}\n{second}\n{answer}\n"
    asked = run(capsys, "generate", MODEL, "What is a slot?", "--chat", *FEW)[0]
    assert asked == f"{answer}\n"
    say(monkeypatch, "What is a slot?", "And a block?")
    told = [json.loads(line) for line in run(capsys, "chat", MODEL, "--json", *FEW)[0].splitlines()]
    assert [one["text"] for one in told] == [answer, second]
    assert [one["message"] for one in told] == ["What is a slot?", "And a block?"]
    system = [{"role": "system", "content": "Be brief."}, first]
    say(monkeypatch, "What is a slot?")
    prompts: list[object] = []
    monkeypatch.setattr(llm, "encode_chat", lambda messages: prompts.append(list(messages)) or [1, 2])
    run(capsys, "chat", MODEL, "--system", "Be brief.", *FEW)
    assert prompts == [system]


def test_a_message_that_does_not_fit_is_told_and_forgotten(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = llm.chat([{"role": "user", "content": "What is a slot?"}], GREEDY).text
    say(monkeypatch, "word " * 3000, "What is a slot?")
    out, err = run(capsys, "chat", MODEL, *FEW, status=1)
    assert out == f"{answer}\n" and "prompt must have" in err and err.count("\n") == 1


def test_an_interrupt_stops_the_answer_only(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = llm.stream, [3]

    def interrupted(*args: object) -> Iterator[object]:
        for delta in real(*args):  # type: ignore[arg-type]
            if left[0] == 0:
                left[0] -= 1
                raise KeyboardInterrupt
            left[0] -= 1
            yield delta

    monkeypatch.setattr(llm, "stream", interrupted)
    say(monkeypatch, "What is a slot?", "What is a slot?")
    first, second = run(capsys, "chat", MODEL, *FEW)[0].splitlines()
    assert first.endswith(" [stopped]") and 0 < len(first.removesuffix(" [stopped]")) < len(second)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_a_signal_stops_an_answer_and_the_program_goes_on() -> None:
    """The whole program, and every process that it started, gets what a terminal sends at Ctrl-C."""
    command = [sys.executable, "-m", "pagedattn", "chat", MODEL, "--device", "cpu", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--max-tokens", "1900"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        watchdog = Timer(120, process.kill)  # an answer that nothing stops ends in a wait for the next question
        watchdog.start()
        for _ in range(2):  # the second answer needs the chat template's process again
            process.stdin.write(b"What is a slot?\n")
            process.stdin.flush()
            assert process.stdout.read(1) == b"A"
            os.killpg(process.pid, signal.SIGINT)
            # An answer may have lines that were written before the signal came.
            assert any(line.endswith(b" [stopped]\n") for line in process.stdout)
        process.stdin.close()
        assert process.wait(60) == 0 and process.stderr.read() == b""
        watchdog.cancel()


BAD = {
    "generate": "the following arguments are required: MODEL",
    "generate MODEL": "a PROMPT is needed",
    "generate MODEL x --topp 1 y": "unrecognized arguments: --topp 1 y",
    "chat MODEL x": "unrecognized arguments: x",
    "generate MODEL x --top-p 0": "top_p must be in (0, 1]",
    "generate MODEL x --max-tokens 0": "max_tokens must be an integer from 1",
    "generate MODEL x --set backend": "--set must be NAME=VALUE",
    "generate MODEL x --set bakend=TORCH": "did you mean backend?",
    "generate MODEL x --set enable_prefix_caching=False": "a value as in JSON, false, got False",
    "generate MODEL x --set model=other": "give its folder as MODEL",
    "generate MODEL x --dtype float7": "expected one of bf16, fp16, fp32, fp64, bfloat16",
    "generate MODEL x --device hpu": "expected a device that is here, got 'hpu'",
    "generate MODEL --topp -- x": "unrecognized arguments: --topp -- x",
    "env -- x": "unrecognized arguments: ",
    "generate MODEL x --file /nowhere": "--file /nowhere cannot be read",
    "generate MODEL x --backend TORHC --set seed=1": "did you mean TORCH?",
    "chat": "the following arguments are required: MODEL",
    "conformance TORCH --device gpu": "expected a device such as cuda or cpu, got 'gpu'",
    "conformance TORCH --device hpu": "expected a device that is here, got 'hpu'",
    "conformance NOBODY": "backend must be one of",
    "conformance torch:Tensor": "a subclass of AttentionBackend",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_value_is_one_line_and_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *(MODEL if word == "MODEL" else word for word in line.split()), status=2)
    assert not out and BAD[line] in err and err.count("\n") == 1


def test_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name, problem in (("examples/tiny-qwen3", "does not exist"), ("file", "is no folder")):
        out, err = run(capsys, "generate", name, "x", status=1)
        expected = f"model must be a local folder in Hugging Face format, got {str(tmp_path.resolve() / name)!r}"
        assert not out and err.count("\n") == 1
        assert err.startswith(f"pagedattn: {expected}, which {problem}; run in the checkout")
        assert err.endswith("hf download NAME --local-dir FOLDER\n")


def test_a_relative_name_is_told_as_the_file_that_was_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"got '{tmp_path / 'absent'}'" in run(capsys, "generate", "absent", "x", status=1)[1]
    missing = f"--file {tmp_path / 'absent.txt'} cannot be read: "
    assert run(capsys, "generate", MODEL, "--file", "absent.txt", status=2)[1].count(str(tmp_path)) == 1
    assert missing in run(capsys, "generate", MODEL, "--file", "absent.txt", status=2)[1]


def test_tracebacks_only_where_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> int:
        raise KeyError("seven")

    monkeypatch.setattr(cli.env_report, "run", broken)
    assert run(capsys, "env", status=1)[1] == "pagedattn: KeyError: 'seven' (--traceback shows where)\n"
    assert "in broken" in run(capsys, "env", "--traceback", status=1)[1]
    monkeypatch.setenv("PAGEDATTN_TRACEBACK", "1")
    assert "in broken" in run(capsys, "env", status=1)[1]
    monkeypatch.setenv("PAGEDATTN_TRACEBACK", "perhaps")
    assert "PAGEDATTN_TRACEBACK must be one of 0, 1" in run(capsys, "env", status=2)[1]


def test_an_interrupted_command_has_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.env_report, "run", interrupted)
    assert run(capsys, "env", status=130) == ("", "")


@pytest.mark.parametrize("command", ["generate", "chat", "why"])
def test_help_says_how_tokens_are_kept_in_16_bit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "NAME:window=N or NAME:first=N" in text and "the last or the first N tokens" in text
