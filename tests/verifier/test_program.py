"""`code` and its sandbox, on every rung of this machine: given cases, more cheats, what is kept out. Does not cover the pool."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from verifier import check_gold, program, program_asserts, sandbox
from verifier.program_values import Rules, Strange, decode, matches

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "code.jsonl").read_text().splitlines()]
RUNGS = [r for r in ("bubblewrap", "landlock", "uid") if sandbox.probe(r).rung]
SLOW = {"c057", "c058", "c060", "c070", "c065"}
ADD = "def add(a, b):\n    return a + b\n"
LIMITS = {"time_s": 1, "mem_mb": 256, "out_kb": 64}


def judge(code, tests, rung="auto", limits=LIMITS, **options):
    return program.verify(json.dumps(tests), code, {"sandbox": rung, **options}, {"program": True, "limits": limits})


def call(*cases, fn="add"):
    return {"type": "call", "fn": fn, "cases": list(cases)}


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_case(case):
    runs = 2 if "must_not" in case else 1
    for rung in RUNGS if case["id"] not in SLOW else RUNGS[:1]:
        for _ in range(runs):
            start = time.monotonic()
            limits = {**case["limits"], "time_s": 1} if case["id"] in SLOW else case["limits"]
            meta = {"limits": limits, "program": "code" in case}
            verdict = program.verify(json.dumps(case["tests"]), case.get("code") or case["response"], {"sandbox": rung}, meta)
            assert time.monotonic() - start < case["max_seconds"]
            if case["kind"] == "vacuous":
                assert verdict.status == "error"
            else:
                assert verdict.reward == case["expect"], (rung, case["why"], verdict)
    assert not os.path.exists("/etc/cs_escape")
    assert not any(p.info["cmdline"][:2] == ["sleep", "1000"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"])


def test_this_machine_has_a_sandbox():
    assert RUNGS, str(sandbox.probe("auto"))


@pytest.mark.parametrize("rung", RUNGS)
def test_what_a_program_cannot_reach(rung, tmp_path):
    (tmp_path / "secret").write_text("x")
    os.environ["WINNOW_TEST_SECRET"] = "x"
    listener = socket.create_server(("127.0.0.1", 0))
    code = f"""
import ctypes, os, socket
got = []
def attempt(name, f):
    try:
        f()
    except BaseException:
        return
    got.append(name)
def environment():
    text = ''
    for pid in ('self', str(os.getppid()), '1', '{os.getpid()}'):
        try:
            text += open('/proc/%s/environ' % pid, 'rb').read().decode()
        except OSError:
            pass
    text += repr(os.environ)
    assert 'WINNOW_TEST_SECRET' in text
libc = ctypes.CDLL(None, use_errno=True)
def ok(n):
    assert n >= 0
attempt('read', lambda: open({str(tmp_path / "secret")!r}).read())
attempt('passwd', lambda: open('/etc/passwd').read())
attempt('list', lambda: os.listdir({str(tmp_path)!r}))
attempt('write', lambda: open({str(tmp_path / "new")!r}, 'w'))
attempt('write here', lambda: open('/etc/new', 'w'))
attempt('write shm', lambda: open('/dev/shm/new', 'w'))
attempt('mkdir', lambda: os.mkdir('/new'))
attempt('environment', environment)
attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1))
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)))
attempt('unix', lambda: socket.socketpair())
attempt('fork', os.fork)
attempt('exec', lambda: os.execv('/bin/true', ['true']))
attempt('spawn', lambda: os.posix_spawn('/bin/true', ['true'], {{}}))
attempt('kill', lambda: os.kill(os.getppid(), 0))
attempt('killall', lambda: os.kill(-1, 0))
attempt('setuid', lambda: os.setuid(0) if os.getuid() else ok(-1))
attempt('chroot', lambda: os.chroot('.'))
attempt('unshare', lambda: ok(libc.unshare(0x10000000)))
attempt('mount', lambda: ok(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)))
attempt('ptrace', lambda: ok(libc.ptrace(16, os.getppid(), 0, 0)))
attempt('memfd', lambda: os.memfd_create('x'))
attempt('io_uring', lambda: ok(libc.syscall(425, 1, 0)))
attempt('pidfd', lambda: os.pidfd_open(os.getppid()))
attempt('bpf', lambda: ok(libc.syscall(321, 0, 0, 0)))
attempt('prctl', lambda: ok(libc.prctl(1, 0, 0, 0, 0)))
attempt('hard limit', lambda: __import__('resource').setrlimit(0, (100, 100)))
def result():
    open('own', 'w').write('x')
    return got
"""
    verdict = sandbox.run(sandbox.Job(code, "steps", steps=[("call", "result", ())]), sandbox.limits_of(LIMITS), rung)
    listener.close()
    assert verdict.complete and decode(verdict.values[0]) == [], verdict
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret"]


@pytest.mark.parametrize("rung", RUNGS)
def test_threads_are_allowed_and_bounded(rung):
    code = (
        "import threading\ndef add(a, b):\n    out = []\n    t = threading.Thread(target=lambda: out.append(a + b))\n"
        "    t.start()\n    t.join()\n    return out[0]\n"
    )
    assert judge(code, call([[1, 2], 3]), rung).reward == 1


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
            "time.sleep(60)",
            "ignores signals",
        ),
        ("import os\nwhile True: os.write(1, b'6\\n' * 1000)", "infinite output"),
        ("import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass", "closes its pipes"),
        (
            "import os\nfor fd in range(3, 64):\n"
            "    try: os.write(fd, b'[\"value\", [\"i\", \"0x3\"]]\\n[\"end\"]\\n')\n    except OSError: pass\n"
            "os._exit(0)",
            "forges a wrong report",
        ),
        (
            "import os\nwhile True:\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 65536)\n        except OSError: pass",
            "floods every pipe",
        ),
        ("x = 'a' * (1 << 34)", "memory"),
        ("import sys\nsys.exit(0)", "exit"),
        ("import os\nos.abort()", "abort"),
        ("def add(a, b):\n    return " + "[" * 30 + "3" + "]" * 30, "nested value"),
        ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", "a value that contains itself"),
        ("def add(a, b):\n    return 10 ** 100000", "a value larger than the bound"),
        ("\x00", "a NUL"),
        ("def add(a, b):\n    return '\\ud800'", "a lone surrogate"),
        ("class A(int): pass\ndef add(a, b):\n    return A(a + b)", "an int of another class"),
        ("def add(a, b):\n    return True if a + b == 1 else a + b", "True for 1"),
        ("add = 5", "no function"),
        ("(" * 5000, "too deep to compile"),
    ],
    ids=lambda x: x if isinstance(x, str) and "\n" not in x and len(x) < 40 and "\x00" not in x and "(((" not in x else "",
)  # fmt: skip
def test_no_reward_and_an_end_in_time(code, why):
    start = time.monotonic()
    tests = call([[0, 1], 1], [[1, 1], 2])
    verdict = judge(code, tests, RUNGS[0])
    assert verdict.status != "error" and verdict.reward == 0, why
    assert time.monotonic() - start < LIMITS["time_s"] + sandbox.WALL_SLACK + 1
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE and "bwrap" in p.name()]


@pytest.mark.parametrize(
    ("source", "expect"),
    [
        ("assert add(1, 2) == 3", 1),
        ("assert 3 == add(1, 2)", 1),
        ("assert add(1, 2) == 4", 0),
        ("assert abs(add(1, 2) - 3.0) < 1e-6", 1),
        ("assert sorted([add(1, 2), add(0, 1)]) == [1, 3]", 1),
        ("assert add(1, 2) in (3, 4)", 1),
        ("assert not add(1, -1)", 1),
        ("assert add('a', 'b').upper() == 'AB'", 1),
        ("assert add([1], [2])[1] == 2", 1),
        ("assert isinstance(add(1, 2), int) and add(1, 2) > 2", 1),
        ("assert add(add(1, 2), 3) == 6", 1),
        ("x = add(1, 2)\nassert x + 1 == 4", 1),
        ("import math\nassert math.isclose(add(0.1, 0.2), 0.3)", 1),
        ("assert set(add([1], [2])) == {1, 2}", 1),
        ("assert add(1, 2) is None", 0),
    ],
)
def test_asserts(source, expect):
    verdict = judge(ADD, {"type": "assert", "src": [source]}, RUNGS[0])
    assert (verdict.status, verdict.reward) == ("value", expect), verdict


@pytest.mark.parametrize(
    "cheat",
    [
        "class T:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return True\n    def __lt__(s, o): return True\n"
        "    def __sub__(s, o): return 0\n"
        "    def __abs__(s): return 0\n    def __bool__(s): return True\n    def __contains__(s, o): return True\n"
        "    def __len__(s): return 3\n"
        "def add(a, b): return T()",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.sorted = lambda x: [1, 3]\nbuiltins.isinstance = lambda *a: True\n"
        "def add(a, b): return None",
    ],
)  # fmt: skip
def test_asserts_cannot_be_talked_out_of(cheat):
    for source in (
        "add(1, 2) == 3",
        "add(1, 2) != 4",
        "abs(add(1, 2) - 3) < 1e-6",
        "sorted([add(1, 2)]) == [3]",
        "3 in add(1, 2)",
        "len(add(1, 2)) == 3",
    ):
        verdict = judge(cheat, {"type": "assert", "src": [f"assert {source}"]}, RUNGS[0])
        if verdict.reward != 0:
            assert source == "add(1, 2) != 4" and "None" in cheat  # None is not 4


@pytest.mark.parametrize(
    "source",
    [
        "for i in range(3):\n    assert add(i, i) == 2 * i",
        "assert all(add(i, 1) > i for i in range(3))",
        "assert 1 == 1",
        "x = 1",
        "assert (",
        "assert f",
    ],
)
def test_tests_that_cannot_be_judged_outside_are_our_error(source):
    if source == "assert f":
        assert judge("f = True", {"type": "assert", "src": [source]}).reward == 1
        return
    assert judge(ADD, {"type": "assert", "src": [source]}).status == "error"


def test_such_asserts_are_trusted_when_the_recipe_says_so():
    tests = {"type": "assert", "src": ["for i in range(3):\n    assert add(i, i) == 2 * i"]}
    assert judge(ADD, tests).status == "error"
    assert judge(ADD, tests, trust_asserts=True).reward == 1
    assert judge("def add(a, b):\n    return 7", tests, trust_asserts=True).reward == 0


@pytest.mark.parametrize(
    "gold", ["", "not json", "[]", "{}", '{"type": "call", "fn": "f", "cases": []}', '{"type": "call", "fn": "f;g", "cases": [[[1], 1]]}',
             '{"type": "stdio", "cases": [1]}'],
)  # fmt: skip
def test_tests_that_say_nothing_are_our_error(gold):
    assert program.verify(gold, ADD, {}, {"program": True}).status == "error"


def test_without_a_sandbox_it_refuses(monkeypatch):
    monkeypatch.setattr(sandbox, "_try", lambda rung: "not here")
    sandbox.probe.cache_clear()
    try:
        verdict = judge(ADD, call([[1, 2], 3]))
        assert verdict.status == "error" and "no sandbox" in verdict.detail and "none" in verdict.detail
        assert judge(ADD, call([[1, 2], 3]), "none").reward == 1
        assert judge(ADD, call([[1, 2], 3]), "landlock").status == "error"
    finally:
        sandbox.probe.cache_clear()


@pytest.mark.parametrize(
    ("expected", "got", "rules", "same"),
    [
        (1, True, Rules(), False),
        (True, 1, Rules(), False),
        (3, 3.0, Rules(), True),
        (3, 3.0, Rules(numbers=True), False),
        (0.3, 0.1 + 0.2, Rules(), True),
        (0.3, 0.1 + 0.2, Rules(tolerance=0), False),
        (1000000007, 1000000007.5, Rules(), False),
        (float("nan"), float("nan"), Rules(), True),
        (1.0, float("nan"), Rules(), False),
        ([1, 2], (1, 2), Rules(), True),
        ([1, 2], (1, 2), Rules(tuples=True), False),
        ([1, [2]], [1, [2.0]], Rules(), True),
        ([1], {1}, Rules(), False),
        ({"a": 1}, {"a": 1}, Rules(), True),
        ({"a": 1}, {"a": 1, "b": 2}, Rules(), False),
        ("3", 3, Rules(), False),
        (None, 0, Rules(), False),
        (1e308, 10**400, Rules(), False),
        (3, Strange(), Rules(), False),
    ],
)
def test_matches(expected, got, rules, same):
    assert matches(expected, got, rules) is same


@pytest.mark.parametrize(
    "message", [None, [], ["i"], ["i", "x"], ["z"], ["l", 5], ["d", [[["l", []], ["n"]]]], ["o", "T"], ["s", 5], "i", ["f", "nonsense"]]
)
def test_nonsense_from_the_sandbox_is_equal_to_nothing(message):
    value = decode(message)
    assert isinstance(value, Strange) and value != value


def test_extract():
    assert program.extract("a\n```python\nx\n```\nb\n```\ny\n```") == "y\n"
    assert program.extract("```json\n{}\n```\n") is None
    assert program.extract("x = 1") == "x = 1"
    assert program.extract("x = 1", "required") is None
    assert program.extract("<think>```\nx\n```") is None


def test_a_program_has_no_gold_answer_to_check():
    assert check_gold("code", '{"type": "stdio", "cases": [["", "1"]]}') is None


def test_asserts_are_taken_apart():
    (part,) = program_asserts.plan(["assert abs(f(2) - 0.5) < g(1)"])
    assert [s[1] for s in part.steps] == ["f(2)", "g(1)"]
    assert part.check is not None
    assert part.check([0.6, 0.2]) and not part.check([0.6, 0.05])


def test_scratch_of_a_killed_process_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"winnow-scratch-{dead.pid}-x").mkdir()
    (tmp_path / f"winnow-scratch-{os.getpid()}-x").mkdir()
    sandbox._sweep.cache_clear()
    sandbox._sweep()
    assert [p.name for p in tmp_path.iterdir()] == [f"winnow-scratch-{os.getpid()}-x"]
