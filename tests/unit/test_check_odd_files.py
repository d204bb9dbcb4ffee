"""`dslaunch check` on files that a user didn't think odd: names with `=`, line ends, links, read-only files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.files.fileset import File
from dslaunch.files.position import lines_of
from dslaunch.rules.selection import comments
from tests.command import CommandLine

ZERO = '"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}'
OLD = f'{{"train_batch_size": 8, {ZERO}}}\n'
NEW = OLD.replace("gather_fp16", "gather_16bit")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(dslaunch: CommandLine, *words: str) -> list[tuple[str, str]]:
    return [(row["rule"], row["where"]) for row in dslaunch("check", *words, "--json").json["findings"]]


def test_a_path_may_have_an_equals_sign(dslaunch: CommandLine) -> None:
    folder = Path("lr=1e-4")
    folder.mkdir()
    (folder / "ds.json").write_text('{"train_batch_sise": 8}', encoding="utf-8")
    Path("run.sh").write_text("python train.py\n", encoding="utf-8")
    assert ("key.unknown", "lr=1e-4/ds.json:1:2") in rows(dslaunch, "lr=1e-4/ds.json")
    assert ("key.unknown", "lr=1e-4/ds.json:1:2") in rows(dslaunch, "run.sh", "./lr=1e-4")
    assert "recipe= is missing" in dslaunch("check", "lr=2e-4/ds.json").err
    assert "runs/lr=2e-4/ds.json: can't be read" in dslaunch("check", "runs/lr=2e-4/ds.json").err
    assert "not seed=1." in dslaunch("check", "run.sh", "cluster=8xA100", "seed=1").err
    assert dslaunch("report", str(folder)).status == dslaunch("report", "other").status == 2


@pytest.mark.parametrize("odd", ["\f", "\v", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_line_ends_where_the_shell_ends_it(dslaunch: CommandLine, odd: str) -> None:
    script = Path("run.sh")
    script.write_text(
        f"#!/bin/bash\n# a{odd}b\nexport NCCL_SOKET_IFNAME=eth0\nsrun python train.py\n", encoding="utf-8"
    )
    assert ("env.unknown-variable", "run.sh:3:8") in rows(dslaunch, "run.sh")
    assert dslaunch("check", "run.sh", "--fix", "--yes").err.count("+export NCCL_SOCKET_IFNAME") == 1
    assert f"a{odd}b\nexport NCCL_SOCKET_IFNAME=eth0\n" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("odd", ["\f", "\u2028"])
def test_a_line_of_python_and_of_yaml_is_counted_alike(dslaunch: CommandLine, odd: str) -> None:
    waived = "# dslaunch: ignore[script.data-parallel]"
    program = f"import torch\n# a{odd}\nmodel = torch.nn.DataParallel(net)  {waived}\n"
    Path("train.py").write_text(program, encoding="utf-8")
    assert "script.data-parallel" not in {rule for rule, _ in rows(dslaunch, "train.py")}
    if odd != "\f":  # YAML refuses control characters
        text = f"compute_environment: LOCAL_MACHINE\n# a{odd}b\nnum_procesess: 8\n"
        Path("acc.yaml").write_text(text, encoding="utf-8")
        assert [where for _, where in rows(dslaunch, "acc.yaml") if where.startswith("acc.yaml:3:1")]


def test_lines_of_windows_and_without_an_end() -> None:
    assert lines_of("") == []
    assert lines_of("a\r\nb\n\nc") == ["a", "b", "", "c"]
    assert lines_of("a\x0cb\x85c\n") == ["a\x0cb\x85c"]


COMMENTED = [
    ("deepspeed_json", '{"url": "http://x // dslaunch: ignore[key.unknown]"}', 0),
    ("deepspeed_json", "{'''a\n# dslaunch: ignore[key.unknown]\n''': 1}", 0),
    ("deepspeed_json", '{"a": 1} // dslaunch: ignore[key.unknown]', 1),
    ("python", "text = '''\n# dslaunch: ignore[script.cuda]\n'''\nx = 1\n", 0),
    ("python", "x = 'it\\'s'  # dslaunch: ignore[script.cuda]\n", 1),
    ("python", "if x:\n  # dslaunch: ignore[script.cuda]\n", 1),
    ("shell", 'echo "# dslaunch: ignore[env.secret]"\n', 0),
    ("shell", "# it's one\nX='y'  # dslaunch: ignore[env.secret]\n", 1),
    ("shell", "python -c '\nprint(1)  # dslaunch: ignore[env.secret]\n'\n", 1),
    ("accelerate", "a: '# dslaunch: ignore[key.unknown]'\nb: 1  # dslaunch: ignore[key.unknown]\n", 1),
]


@pytest.mark.parametrize(("kind", "text", "count"), COMMENTED)
def test_a_comment_in_a_string_is_none(kind: str, text: str, count: int) -> None:
    assert len(list(comments(File("f", kind, text)))) == count  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["broken.json", "broken.sh", "broken.py"])
def test_select_does_not_hide_a_file_that_cannot_be_read(dslaunch: CommandLine, name: str) -> None:
    texts = {
        "broken.json": '{"zero_optimization": {"stage": 2,',
        "broken.sh": "#!/bin/bash\nif true; then\ntorchrun t.py\n", "broken.py": "import torch\nx = (\n",
    }  # fmt: skip
    Path(name).write_text(texts[name], encoding="utf-8")
    assert dslaunch("check", name, "--select", "zero").status == 6
    assert "file.syntax" in {rule for rule, _ in rows(dslaunch, name, "--select", "zero")}
    assert not rows(dslaunch, name, "--select", "zero", "--ignore", "file.syntax")


def test_fix_leaves_a_read_only_file_and_all_beside_it(dslaunch: CommandLine) -> None:
    for name in ("a.json", "b.json"):
        Path(name).write_text(OLD, encoding="utf-8")
    Path("b.json").chmod(0o444)
    ran = dslaunch("check", "a.json", "b.json", "--fix", "--yes")
    assert (ran.status, "--fix b.json: the file is read-only" in ran.err) == (2, True), ran.err
    assert Path("a.json").read_text() == Path("b.json").read_text() == OLD
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "b.json"]


def test_fix_keeps_links(dslaunch: CommandLine) -> None:
    Path("a.json").write_text(OLD, encoding="utf-8")
    os.link("a.json", "b.json")
    Path("c.json").symlink_to("a.json")
    dslaunch("check", "c.json", "--fix", "--yes")
    assert Path("c.json").is_symlink()
    assert Path("b.json").read_text() == NEW
    assert Path("b.json").samefile("a.json")
    assert sorted(path.name for path in Path().iterdir()) == ["a.json", "b.json", "c.json"]


def test_fix_that_cannot_write_leaves_no_file_behind(
    dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.json").write_text(OLD, encoding="utf-8")

    def busy(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", busy)
    ran = dslaunch("check", "a.json", "--fix", "--yes")
    assert (ran.status, "No space left on device; nothing was written" in ran.err) == (2, True), ran.err
    assert [path.name for path in Path().iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: {ignore: false}", "dslaunch.yaml:1:9: rules.ignore is False"),
        ("rules: {accept: 0}", "dslaunch.yaml:1:9: rules.accept is 0"),
        ("rules: {severity: []}", "dslaunch.yaml:1:9: rules.severity is []"),
        ("versions: {deepspeed: v0.18}", "dslaunch.yaml:1:12: versions.deepspeed is 'v0.18'"),
        ("versions: {megatron: core}", "dslaunch.yaml:1:12: versions.megatron is 'core'"),
    ],
)
def test_a_site_of_wrong_types(dslaunch: CommandLine, text: str, said: str) -> None:
    Path("site").mkdir()
    Path("site/dslaunch.yaml").write_text(text, encoding="utf-8")
    Path("a.json").write_text(NEW, encoding="utf-8")
    ran = dslaunch("check", "a.json", "--config-dir", "site")
    assert (ran.status, said in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    "words", [["zero.pp-stage", "--symptom", "exit -9"], ["--symptom", ""], ["--symptom", " \n"]]
)
def test_explain_takes_a_rule_or_a_symptom(dslaunch: CommandLine, words: list[str]) -> None:
    ran = dslaunch("explain", *words)
    assert (ran.status, ran.out) == (2, "")
    assert "--symptom" in ran.err


def test_a_number_of_too_many_digits_is_told_at_its_place(dslaunch: CommandLine) -> None:
    Path("a.json").write_text('{"train_batch_size": ' + "9" * 100_000 + "}", encoding="utf-8")
    ran = dslaunch("check", "a.json")
    assert ran.out.startswith("a.json:1:22: error: a number too long to read. [file.syntax]"), ran.out[:200]


def test_a_key_cannot_write_lines_of_its_own(dslaunch: CommandLine) -> None:
    Path("a.json").write_text('{"train_batch_size": 8, "x\\n::error::\\u001b[31mred": 1}', encoding="utf-8")
    ran = dslaunch("check", "a.json")
    assert r"no key 'x\n::error::\x1b[31mred'" in ran.out
    assert not [line for line in ran.out.splitlines() if line.startswith("::")]
