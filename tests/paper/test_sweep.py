"""A sweep loses nothing that is finished, whatever becomes of its processes, and repeats
nothing.
"""

import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from click.testing import Result
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from pathcond.cli import commands as cli
from pathcond.cli.exits import RUNS_FAILED, WRONG_USAGE
from pathcond.rows import Rows
from pathcond_paper import reproduction
from pathcond_paper.__main__ import main
from pathcond_paper.figure import Place
from pathcond_paper.sweep import engines
from pathcond_paper.sweep.engines import Advanced, Ended, Finished
from pathcond_paper.sweep.watching import watching

from ..processes import FORKED
from ..strategies import further
from . import figure_for_tests

ROOT = Path(__file__).parents[2]
# This checkout, whichever is installed
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "src")))
ALL = ["a-0", "a-1", "b-0", "b-1"]


class Terminal(StringIO):
    """As if it were one."""

    def isatty(self) -> bool:
        return True


class Folder:
    """Where a sweep of the figure for tests writes, and what its runs are told to do."""

    def __init__(self, path: Path) -> None:
        self.out, self.data = path / "out", path / "data"
        self.data.mkdir()
        self.arguments = [
            "reproduce",
            "fake",
            "--preset",
            "smoke",
            "--out",
            str(self.out),
            "--data",
            str(self.data),
        ]

    def tell(self, *what: str) -> None:
        for file in what:
            (self.data / file).touch()

    def run(self, *more: object) -> Result:
        result = CliRunner().invoke(cli.app, [*self.arguments, *map(str, more)])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result

    def complete(self, seeds: int | None = None) -> None:
        """As after a sweep, without the time that processes take to start."""
        for job in figure_for_tests.jobs("smoke", seeds):
            place = Place(data=self.data)
            for done, result in figure_for_tests.run(
                [{"figure": "fake", "preset": "smoke"} | job], place, lambda *_: None
            ):
                Rows(self.out / "fake.jsonl").append(done, result, {"device": "abacus"})

    def begun(self) -> Counter[str]:
        """How often each run was begun."""
        return Counter(line.split()[0] for line in self._lines())

    def processes(self) -> set[int]:
        return {int(line.split()[1]) for line in self._lines()}

    def _lines(self) -> list[str]:
        file = self.data / "begun"
        return file.read_text().splitlines() if file.exists() else []

    def kept(self) -> list[str]:
        return sorted(row.result["name"] for row in Rows(self.out / "fake.jsonl"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(reproduction, "FIGURES", {"fake": "for tests", "toy": "another"})
    monkeypatch.setattr(reproduction, "load", {"fake": figure_for_tests}.__getitem__)
    monkeypatch.setattr(engines, "get_context", lambda _: FORKED)
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    paths = {"PYTHONPATH": PATHS}
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": paths},
    )
    yield
    ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(true)
        time.sleep(0.05)


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class TestEngines:
    """What both engines promise."""

    # Ray: also by test_ray_starts_a_cluster_where_none_runs.
    @pytest.mark.parametrize("engine", ["local", *further("ray")], indirect=True)
    def test_a_killed_worker_loses_nothing_and_its_run_is_repeated(
        self, engine: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # spawned, as they are for users; so are those of the sweeps in processes of their own
        monkeypatch.setattr(engines, "get_context", multiprocessing.get_context)
        folder.tell("kill-b-0")
        result = folder.run("--engine", engine)
        assert result.exit_code == 0, result.output
        assert folder.kept() == ALL
        assert folder.begun() == {"a-0": 1, "a-1": 1, "b-0": 2, "b-1": 1}

    def test_an_error_in_one_run_leaves_the_others(self, engine: str, folder: Folder) -> None:
        folder.tell("raise-a-0")
        result = folder.run("--engine", engine, "--workers", 2)
        assert result.exit_code == RUNS_FAILED
        assert "1 of 4 runs of fake failed" in result.stderr
        assert "method=a, seed=0" in result.stderr
        assert "method=b" not in result.stderr
        assert "ArithmeticError: no luck with a-0" in result.stderr
        assert folder.kept() == ["a-1", "b-0", "b-1"]
        assert "No verdicts" in result.stdout

    def test_states_of_trainings_lie_beside_the_rows(self, engine: str, folder: Folder) -> None:
        """Of processes of this machine, until they are removed; machines of a cluster share no
        folder.
        """
        folder.tell("state-b-0")
        assert folder.run("--engine", engine).exit_code == 0
        states = folder.out / "unfinished"
        assert states.exists() == (engine == "local")
        if states.exists():
            (states / "b-0").unlink()
            folder.run("--seeds", 3)
            assert not states.exists()

    def test_what_is_finished_is_not_repeated(self, engine: str, folder: Folder) -> None:
        assert folder.run("--engine", engine, "--seeds", 1).exit_code == 0
        assert folder.kept() == ["a-0", "b-0"]
        assert folder.run("--engine", engine, "--seeds", 3).exit_code == 0
        assert folder.begun() == dict.fromkeys([*ALL, "a-2", "b-2"], 1)

    def test_a_worker_that_always_dies(self, engine: str, folder: Folder) -> None:
        folder.tell("kill-always-b-1")
        result = folder.run("--engine", engine, "--workers", 1)
        assert result.exit_code == RUNS_FAILED
        assert "method=b, seed=1\n" in result.stderr
        assert "3 times" in result.stderr
        assert folder.begun() == {"a-0": 1, "b-0": 1, "a-1": 1, "b-1": engines.ATTEMPTS}
        assert folder.kept() == ["a-0", "a-1", "b-0"]


def test_ray_starts_a_cluster_where_none_runs(folder: Folder) -> None:
    """In a process of its own: its output is rows and nothing else, whatever Ray and the runs
    print.
    """
    folder.tell("kill-b-1")
    command = [
        sys.executable,
        "-m",
        "tests.paper.figure_for_tests",
        *folder.arguments,
        "--engine",
        "ray",
        "--workers",
        "1",
        "--json",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": PATHS
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["result"]["name"] for row in json.loads(done.stdout)] == [
        "a-0",
        "b-0",
        "a-1",
        "b-1",
    ]
    assert folder.begun()["b-1"] == 2


class TestInterruption:
    """The sweep's own process is stopped in the middle of b-0, after a-0."""

    @staticmethod
    def started(folder: Folder) -> subprocess.Popen[str]:
        folder.tell("wait-b-0")
        command = [
            sys.executable,
            "-m",
            "tests.paper.figure_for_tests",
            *folder.arguments,
            "--workers",
            "1",
        ]
        pipe = subprocess.PIPE
        sweep = subprocess.Popen(
            command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        until(lambda: (folder.begun()["b-0"] and folder.kept()) or sweep.poll() is not None)
        assert folder.kept() == ["a-0"], sweep.communicate()
        return sweep

    @staticmethod
    def goes_on(folder: Folder) -> None:
        until(lambda: all(map(gone, folder.processes())))
        (folder.data / "wait-b-0").unlink()
        assert folder.run().exit_code == 0
        assert folder.kept() == ALL
        assert folder.begun() == {"a-0": 1, "b-0": 2, "a-1": 1, "b-1": 1}

    def test_killed(self, folder: Folder) -> None:
        sweep = self.started(folder)
        sweep.kill()
        sweep.communicate()
        self.goes_on(folder)

    def test_control_c(self, folder: Folder) -> None:
        sweep = self.started(folder)
        os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: to all processes
        _, err = sweep.communicate()
        assert sweep.returncode == 130
        assert "the same command goes on" in err
        assert "Traceback" not in err
        self.goes_on(folder)


class TestOutputs:
    """Rows, tables, drawings and curves."""

    def test_rows_say_where_they_come_from(self, folder: Folder) -> None:
        result = folder.run("--workers", 2, "--seeds", 2, "--json")
        rows = json.loads(result.stdout)
        assert [row["result"]["name"] for row in rows] == ["a-0", "b-0", "a-1", "b-1"]
        assert rows[0]["job"] == {"figure": "fake", "preset": "smoke", "method": "a", "seed": 0}
        origin = rows[0]["origin"]
        assert (
            origin["command"]
            == "pathcond reproduce fake --preset smoke --device cpu --seeds 2 --workers 2"
        )
        assert origin["torch"] == torch.__version__
        assert origin["seconds"] >= 0
        assert origin.keys() == {
            "command",
            "device",
            "torch",
            "pathcond",
            "python",
            "date",
            "seconds",
            "commit",
        }
        assert "fake: 4 of 4 runs" in result.stderr

    def test_verdicts_of_larger_presets(self, folder: Folder) -> None:
        folder.arguments[folder.arguments.index("smoke")] = "paper"
        result = folder.run("--workers", 1)
        assert "reproduced: it gets better (fig:fake)\n    in 4 runs\n" in result.stdout
        assert "    This library: it does, too\n" in result.stdout
        assert "No verdicts" not in result.stdout

    def test_table_claims_and_files(self, folder: Folder) -> None:
        folder.complete()
        result = folder.run()
        assert "a-0 0.5\nb-0 0.5\na-1 0.5" in result.stdout
        assert "No verdicts: these runs only show that all of it runs." in result.stdout
        assert "reproduced" not in result.stdout
        assert (folder.out / "fake.png").read_bytes().startswith(b"\x89PNG")
        for file in ("fake.jsonl", "fake.png", "fake.svg", "tensorboard/fake"):
            assert str(folder.out / file) in result.stderr

    def test_the_same_rows_give_the_same_drawing_in_whatever_order_they_came(
        self, folder: Folder
    ) -> None:
        folder.complete()
        folder.run()
        first = {suffix: (folder.out / f"fake.{suffix}").read_bytes() for suffix in ("svg", "png")}
        head, *lines = (folder.out / "fake.jsonl").read_text().splitlines(keepends=True)
        assert len(lines) == 4
        (folder.out / "fake.jsonl").write_text(head + "".join(reversed(lines)))
        for suffix in first:
            (folder.out / f"fake.{suffix}").unlink()
        folder.run()
        assert {suffix: (folder.out / f"fake.{suffix}").read_bytes() for suffix in first} == first
        assert b"<dc:date>" not in first["svg"]
        assert folder.begun() == dict.fromkeys(ALL, 1)

    def test_curves_in_tensorboard_are_there_once(self, folder: Folder) -> None:
        folder.complete()
        for _ in range(2):
            folder.run()
        curves = folder.out / "tensorboard" / "fake"
        assert sorted(path.name for path in curves.iterdir()) == [
            f"method={m},seed={s}" for m in "ab" for s in (0, 1)
        ]
        events = EventAccumulator(str(curves / "method=b,seed=1")).Reload()
        assert events.Tags()["scalars"] == ["loss"]
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [
            (i, pytest.approx(1 / (i + 2))) for i in range(3)
        ]

    def test_without_matplotlib_and_tensorboard(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("matplotlib", "tensorboard"):
            monkeypatch.setitem(sys.modules, module, None)
        folder.complete()
        result = folder.run()
        assert result.exit_code == 0
        assert 'pip install "pathcond-paper[experiments]"' in result.stderr
        assert "a-0 0.5" in result.stdout
        assert [path.name for path in folder.out.glob("[!.]*")] == ["fake.jsonl"]

    def test_all_goes_on_after_a_figure_that_fails(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(name: str) -> object:
            if name == "toy":
                raise ImportError("toy needs something")
            return figure_for_tests

        monkeypatch.setattr(reproduction, "FIGURES", {"toy": "broken", "fake": "for tests"})
        monkeypatch.setattr(reproduction, "load", load)
        folder.arguments[1] = "all"
        result = folder.run("--workers", 1)
        assert result.exit_code == RUNS_FAILED
        assert "toy needs something" in result.stderr
        assert "toy failed" in result.stderr
        assert folder.kept() == ALL
        assert (
            next(iter(Rows(folder.out / "fake.jsonl")))
            .origin["command"]
            .startswith("pathcond reproduce fake")
        )

    def test_bars(self) -> None:
        """The bar of all counts runs under way by their share, and no run twice."""
        with watching("fake", 3, Terminal()) as watch:
            seen = []
            done = {"job": {}, "result": {}, "origin": {}}
            for event in (
                Advanced(task=0, runs=2, share=0.25, text="x"),
                Advanced(task=0, runs=2, share=0.75, text="x"),
                Finished(task=0, **done),
                Advanced(task=0, runs=1, share=0.0, text="again"),
                Finished(task=1, **done),
                Advanced(task=0, runs=1, share=0.9, text="x"),
                Finished(task=0, **done),
                Ended(task=0),
            ):
                watch(event)
                seen.append(watch.bars.tasks[0].completed)  # type: ignore[attr-defined]
            assert seen == pytest.approx([0.5, 1.5, 1.5, 1, 2, 2.9, 3, 3])
            assert len(watch.bars.tasks) == 1  # type: ignore[attr-defined]


def test_a_part_of_the_runs(folder: Folder) -> None:
    result = folder.run("--workers", 1, "--only", "method=b", "--only", "seed=1e0")
    assert result.exit_code == 0
    assert folder.kept() == ["b-1"]
    (row,) = Rows(folder.out / "fake.jsonl")
    assert row.origin["command"].endswith("--only method=b --only seed=1e0 --workers 1")
    folder.run("--workers", 1)
    assert folder.begun() == dict.fromkeys(ALL, 1)


class TestPlainFrontEnd:
    """``python -m pathcond_paper``, which shares all but the options with ``pathcond``."""

    def test_rows_name_the_command_and_both_go_on_with_them(
        self, folder: Folder, capsys: pytest.CaptureFixture
    ) -> None:
        some = ["--only", "method=b", "--seeds", "2", "--workers", "1", "--json"]
        assert main([*folder.arguments, *some]) == 0
        shown = capsys.readouterr()
        rows = json.loads(shown.out)
        assert [row["result"]["name"] for row in rows] == ["b-0", "b-1"]
        typed = "reproduce fake --preset smoke --device cpu --seeds 2 --only method=b --workers 1"
        assert rows[0]["origin"]["command"] == f"python -m pathcond_paper {typed}"
        assert "fake: 2 of 2 runs" in shown.err
        assert folder.run("--workers", 1).exit_code == 0
        assert main(folder.arguments) == 0
        assert "No verdicts" in capsys.readouterr().out
        assert folder.begun() == dict.fromkeys(ALL, 1)

    def test_errors_are_sentences(self, folder: Folder, capsys: pytest.CaptureFixture) -> None:
        folder.tell("raise-a-0")
        assert main([*folder.arguments, "--workers", "1"]) == RUNS_FAILED
        assert "1 of 4 runs of fake failed" in capsys.readouterr().err
        assert main([*folder.arguments, "--device", "gpu"]) == WRONG_USAGE
        assert "There is no device 'gpu'" in capsys.readouterr().err
        folder.arguments[1] = "fak"
        assert main(folder.arguments) == WRONG_USAGE
        assert "Did you mean 'fake'?" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "wrong", [["--seeds", "0"], ["--workers", "0"], ["--preset", "huge"], ["--seed", "1"]]
    )
    def test_options(self, folder: Folder, wrong: list[str], capsys: pytest.CaptureFixture) -> None:
        with pytest.raises(SystemExit) as stopped:
            main([*folder.arguments, *wrong])
        assert stopped.value.code == WRONG_USAGE
        assert wrong[0] in capsys.readouterr().err

    def test_the_same_options_as_the_other(self, capsys: pytest.CaptureFixture) -> None:
        theirs = (
            CliRunner()
            .invoke(cli.app, ["reproduce", "--help"], env={"TERMINAL_WIDTH": "200"})
            .output
        )
        with pytest.raises(SystemExit):
            main(["reproduce", "--help"])
        ours = capsys.readouterr().out
        options = [
            set(re.findall(r"--[a-z]+", re.sub(r"\x1b\[[0-9;]*m", "", text)))
            for text in (ours, theirs)
        ]
        assert options[0] == options[1] > {"--only", "--seeds", "--workers"}

    def test_the_list(self, folder: Folder, capsys: pytest.CaptureFixture) -> None:
        assert main(["reproduce", "--list"]) == 0
        assert capsys.readouterr().out == "  fake  for tests\n  toy   another\n"

    def test_lines_without_rich(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs that are trained together finish together: until then lines say how far they are."""
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setattr("pathcond_paper.sweep.watching.SILENCE", -1.0)
        terminal = Terminal()
        with watching("fake", 4, terminal) as watch:
            watch(Advanced(task=0, runs=2, share=0.5, text="epoch 5 of 10"))
            watch(Finished(task=0, job={}, result={}, origin={}))
        half, one = terminal.getvalue().splitlines()
        assert half == "fake: 0 of 4 runs, 25% of the work; epoch 5 of 10"
        assert one == "fake: 1 of 4 runs, 25% of the work"


class TestRefusals:
    """Wrong input is one sentence and exit code 2, before anything is computed."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--seeds", 0], "--seeds"),
            (["--seeds", -1], "--seeds"),
            (["--workers", 0], "--workers"),
            (["--preset", "huge"], "--preset"),
            (["--engine", "slurm"], "--engine"),
            (["--device", "gpu"], "There is no device 'gpu'"),
            (["--device", "meta"], "do not run on 'meta'"),
            (["--device", "cuda"], "torch .* sees none"),
            (["--device", "cuda:1"], "torch .* sees none"),
            (["--engine", "ray", "--device", "cuda:1"], "--device cuda, not cuda:1"),
            (["--preset", "cpu"], "mnist is not here.*\n  pathcond data get mnist --dir"),
            (["--only", "method"], "--only method: write it as SETTING=VALUE"),
            (["--only", "depth=3"], "have no 'depth'; they have figure, preset, method, seed"),
            (["--only", "method=a,c"], "has method c; there is a, b"),
            (["--out", "/proc/nothing"], "cannot go to /proc/nothing"),
            (["--out", __file__], "it is a file"),
        ],
    )
    def test_options(
        self, folder: Folder, arguments: list[object], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setenv("TERMINAL_WIDTH", "200")
        result = folder.run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.search(message, result.stderr), result.stderr
        assert not folder.begun()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fak", "no 'fak' to reproduce. Did you mean 'fake'?"),
            ("al", "Did you mean 'all'?"),
            ("mlp", "no 'mlp' to reproduce. Choose one of these, or all"),
        ],
    )
    def test_names(self, folder: Folder, name: str, message: str) -> None:
        folder.arguments[1] = name
        result = folder.run()
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert "fake  for tests" in result.stderr

    def test_a_gpu_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert engines.slots("cuda") == ["cuda:0", "cuda:1"]
        assert engines.slots("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
        assert engines.slots("cuda:1") == ["cuda:1"]
        with pytest.raises(engines.EngineError, match="no cuda:2: torch sees 2 GPUs"):
            engines.slots("cuda:2")

    def test_ray_without_gpus(self, ray_cluster: None, folder: Folder) -> None:
        result = folder.run("--engine", "ray", "--device", "cuda")
        assert result.exit_code == 2
        assert "The Ray cluster has no GPU" in result.stderr

    def test_ray_that_is_not_installed(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        result = folder.run("--engine", "ray")
        assert result.exit_code == 2
        assert 'pip install "pathcond-paper[ray]"' in result.stderr

    def test_results_of_another_preset_or_version(self, folder: Folder) -> None:
        folder.complete()
        result = folder.run("--preset", "paper")
        assert result.exit_code == 2
        assert "holds runs of preset smoke" in result.stderr
        assert "--out" in result.stderr
        (folder.out / "fake.jsonl").write_text('{"format": 0}\n')
        result = folder.run()
        assert result.exit_code == 2
        assert "another version" in result.stderr
        assert folder.begun() == dict.fromkeys(ALL, 1)

    @pytest.mark.parametrize(
        "row",
        [
            '{"job": 1, "result": {}, "origin": {}}',
            '{"job": {"figure": "fake", "preset": "smoke", "method": "a", "seed": 0}, "result": '
            "{}, "
            '"origin": {}}',
        ],
    )
    def test_damaged_rows(self, row: str, folder: Folder) -> None:
        folder.complete()
        file = folder.out / "fake.jsonl"
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], row, *lines[2:]]) + "\n")
        result = folder.run()
        assert result.exit_code == 2
        assert "fake.jsonl" in result.stderr

    def test_another_sweep_at_work(self, folder: Folder) -> None:
        folder.out.mkdir()
        with (folder.out / ".fake.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = folder.run()
        assert result.exit_code == 2
        assert "Another sweep of fake is at work" in result.stderr
        assert not folder.begun()

    def test_ray_that_does_not_answer(
        self, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        result = folder.run("--engine", "ray")
        assert result.exit_code == 2
        assert "No Ray cluster answers at 127.0.0.1:1" in result.stderr

    def test_a_full_disk(
        self, engine: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        folder.complete(seeds=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            result = folder.run("--engine", engine)
        assert result.exit_code == 2
        assert "disk is full" in result.stderr
        assert folder.kept() == ["a-0", "b-0"]
        until(lambda: all(map(gone, folder.processes() - {os.getpid()})))

    def test_a_result_that_is_no_json(self, folder: Folder) -> None:
        folder.tell("tensor-b-1")
        result = folder.run("--workers", 1)
        assert result.exit_code == RUNS_FAILED
        assert "not JSON serializable" in result.stderr
        assert "method=b, seed=1" in result.stderr
        assert folder.kept() == ["a-0", "a-1", "b-0"]

    def test_complete_results_need_no_data_and_no_device(
        self, folder: Folder, tmp_path: Path
    ) -> None:
        folder.complete()
        result = folder.run("--device", "cuda:77", "--data", tmp_path / "nowhere")
        assert result.exit_code == 0
        assert "a-0 0.5" in result.stdout
