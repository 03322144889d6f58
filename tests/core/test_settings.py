import pytest
from pydantic import Field

from core.settings import Settings, load_settings


class Example(Settings):
    model: str = Field(description="Where the model lies")
    wait_s: float = Field(1.0, description="How long to wait")
    sizes: list[int] = Field([1], description="Sizes")
    max_num_seqs: int = Field(8, ge=1, description="Most sequences in a batch")


def load(*argv):
    return load_settings(Example, "example", argv)


def refusal(capsys, *argv):
    """What is said on standard error about wrong arguments."""
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_flags_are_kebab_case_and_defaults_hold():
    assert load("--model", "m") == Example(model="m", max_num_seqs=8)
    assert load("--model", "m", "--max-num-seqs", "3").max_num_seqs == 3


def test_a_flag_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("BATON_MODEL", "from-env")
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "5")
    assert load() == Example(model="from-env", max_num_seqs=5)
    assert load("--model", "from-flag").model == "from-flag"


def test_help_shows_descriptions_and_ends_with_zero(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    assert "Most sequences in a batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--model", "m", "--nope", "1"), "example: error: unrecognized arguments: --nope 1"),
        (("--model", "m", "--max-num-seqs", "0"), "--max-num-seqs: input should be greater"),
        (("--model", "m", "--max-num-seqs", "x"), "--max-num-seqs: input should be a valid int"),
        (("--model", "m", "--wait-s", "inf"), "--wait-s: input should be a finite number"),
        (("--model", "m", "--sizes", "1,x"), "--sizes: input should be a valid int"),
        ((), "--model: field required"),
        (("--model",), "--model: expected one argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_two(capsys, argv, line):
    said = refusal(capsys, *argv)
    assert line in said
    assert said.count("\n") == 1
