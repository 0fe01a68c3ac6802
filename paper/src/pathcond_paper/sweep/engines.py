"""Where the tasks of a sweep are computed: processes of this machine (``local``) or a Ray cluster
(``cluster``).

Both take the tasks, lists of jobs for one process each, and yield what happens as events. A process
that dies loses the runs that it was at and nothing else: its task goes on with the jobs that have
no result, ``ATTEMPTS`` times at most. If a run raises an error, the jobs of its task are tried one
by one, so that only those end without a result that cannot be computed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import Queue
from typing import Any, TypeAlias

import torch

from pathcond.rows import Job, Result

from ..figure import Place
from ..origin import commit, origin

ATTEMPTS = 3
INTERVAL = 0.2  # seconds between two words on the progress of a task


class EngineError(ValueError):
    """Tasks cannot be computed as asked for; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """A task with so many runs is so far: the share that is done, and a few words."""

    task: int
    runs: int
    share: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run has its result; ``origin`` has the seconds since the task's previous result."""

    task: int
    job: Job
    result: Result
    origin: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Nothing more comes of a task.

    Attributes:
        task: Which.
        problem: Why some of its jobs have no result; None if all have.
        jobs: Those.
    """

    task: int
    problem: str | None = None
    jobs: tuple[Job, ...] = ()


Event: TypeAlias = Advanced | Finished | Ended
Engine: TypeAlias = Callable[
    [str, Sequence[Sequence[Job]], Place, int | None], Generator[Event, None, None]
]


@dataclass
class _Task:
    number: int
    jobs: list[Job]  # without a result
    deaths: int = 0


class _Tasks:
    """Those that wait for a process, and what becomes of one that ended early."""

    def __init__(self, tasks: Sequence[Sequence[Job]]) -> None:
        self._numbers = itertools.count()
        self.waiting = deque(_Task(next(self._numbers), list(jobs)) for jobs in tasks)

    def heard(self, task: _Task, event: Event) -> Event:
        """Note what a process says of its task; returns it as the sweep should hear it."""
        if isinstance(event, Finished):
            task.jobs.remove(event.job)
        elif isinstance(event, Ended) and event.problem is not None:
            if len(task.jobs) == 1:
                return replace(event, jobs=tuple(task.jobs))
            self.waiting.extend(_Task(next(self._numbers), [job]) for job in task.jobs)
            return Ended(task=task.number)
        return event

    def note_death(self, task: _Task, how: str) -> Event:
        """Let a task whose process is gone wait for another, unless that was too often."""
        task.deaths += 1
        if not task.jobs:
            return Ended(task=task.number)
        if task.deaths == ATTEMPTS:
            return Ended(
                task=task.number,
                problem=f"{how}, {ATTEMPTS} times; was it out of memory?",
                jobs=tuple(task.jobs),
            )
        self.waiting.appendleft(task)
        return Advanced(task=task.number, runs=len(task.jobs), share=0.0, text=f"{how}: again")


def compute(
    figure: str, number: int, jobs: Sequence[Job], place: Place, send: Callable[[Event], object]
) -> None:
    """Run one task in this process.

    Args:
        figure: Name of its module.
        number: Of the task.
        jobs: Its runs.
        place: Where; this process has no other device.
        send: Told each event as it happens, last that the task has ended.
    """
    # that "paper" changes train mode is known, and said a hundred times
    logging.getLogger("pathcond").setLevel(logging.ERROR)
    since = time.monotonic()
    told = -INTERVAL

    def progress(share: float, text: str) -> None:
        nonlocal told
        if time.monotonic() - told >= INTERVAL:
            told = time.monotonic()
            send(Advanced(task=number, runs=len(jobs), share=share, text=text))

    try:
        commit()  # now, as long as the files are those that this process has loaded
        if torch.device(place.device).type == "cuda":
            torch.cuda.set_device(place.device)
        else:
            # as many processes as cores; and sums do not depend on the number of cores
            torch.set_num_threads(1)
        missing = list(jobs)
        for job, result in importlib.import_module(figure).run(jobs, place, progress):
            json.dumps(result)  # what is no JSON is an error of this run, not of the sweep
            missing.remove(job)
            seconds, since = time.monotonic() - since, time.monotonic()
            send(
                Finished(
                    task=number,
                    job=job,
                    result=result,
                    origin=origin(place.device) | {"seconds": round(seconds, 3)},
                )
            )
        if missing:
            raise RuntimeError(f"{figure}.run ended without results of {missing}")
    except BaseException:  # whatever it is, the sweep waits to hear of it
        send(Ended(task=number, problem=traceback.format_exc()))
    else:
        send(Ended(task=number))


def local(
    figure: str, tasks: Sequence[Sequence[Job]], place: Place, workers: int | None = None
) -> Generator[Event, None, None]:
    """Compute tasks in processes of this machine: one per GPU of "cuda", or one per core.

    Args:
        figure: Name of the module; processes import it.
        tasks: Lists of jobs, each for one process.
        place: Where; "cuda" is all GPUs, one for each process.
        workers: Number of processes instead.

    Yields:
        What happens, until all tasks have ended. Closing the iterator ends the processes.

    Raises:
        EngineError: There is no such device.
    """
    todo = _Tasks(tasks)
    idle = deque(
        _Worker(figure, replace(place, device=device)) for device in slots(place.device, workers)
    )
    busy: dict[_Worker, _Task] = {}
    try:
        while todo.waiting or busy:
            while idle and todo.waiting:
                worker = idle.popleft()
                task = todo.waiting.popleft()
                busy[worker] = task
                worker.begin(task)
            ready = wait([worker.link for worker in busy])
            for worker in [worker for worker in busy if worker.link in ready]:
                task = busy[worker]
                said = worker.hear()
                if said is None or isinstance(said, Ended):
                    idle.append(worker)
                    del busy[worker]
                if said is None:
                    yield todo.note_death(
                        task, f"its process ended by itself (exit code {worker.end()})"
                    )
                else:
                    if isinstance(said, Ended) and said.problem:
                        worker.end()  # an error on a GPU spoils what follows it in the same process
                    yield todo.heard(task, said)
    finally:
        for worker in (*idle, *busy):
            worker.end()


def slots(device: str, workers: int | None = None) -> list[str]:
    """The device of each process.

    >>> slots("cpu", 2)
    ['cpu', 'cpu']
    """
    kind = _device(device)
    if kind.type == "cpu":
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        return ["cpu"] * (workers or cores)
    count = torch.cuda.device_count()
    if not count:
        raise EngineError(
            f"{device} needs a GPU, and torch {torch.__version__} sees none here. "
            "The same runs on --device cpu."
        )
    if kind.index is not None and kind.index >= count:
        raise EngineError(
            f"There is no {device}: torch sees {count} "
            f"GPU{'s' if count > 1 else ''}, the last is cuda:{count - 1}."
        )
    devices = [f"cuda:{index}" for index in range(count)] if kind.index is None else [device]
    return [devices[i % len(devices)] for i in range(workers or len(devices))]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"There is no device {name!r}: choose cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"The experiments do not run on {name!r}: choose cpu, cuda or cuda:N.")
    return device


class _Worker:
    """A process with one device, started by its first task and anew by the first after its end."""

    def __init__(self, figure: str, place: Place) -> None:
        self.figure = figure
        self.place = place
        self.process: BaseProcess | None = None
        self.link: Connection

    def begin(self, task: _Task) -> None:
        if self.process is None:
            spawn = get_context("spawn")  # CUDA does not survive a fork
            self.link, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(self.figure, self.place, theirs), daemon=True
            )
            with _no_interrupts():
                process.start()
            self.process = process
            # so that the process is the only one at that end: it closes when the process is gone
            theirs.close()
        with suppress(BrokenPipeError):  # of a process that is gone, as will be heard
            self.link.send((task.number, task.jobs))

    def hear(self) -> Event | None:
        """What it says next; None when it is gone, after all that it had said."""
        try:
            event: Event = self.link.recv()
        except (EOFError, OSError):
            return None
        return event

    def end(self) -> int | None:
        if self.process is None:
            return None
        self.process.kill()
        self.process.join()
        self.link.close()
        code, self.process = self.process.exitcode, None
        return code


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes begun meanwhile leave Ctrl-C, which reaches all of them, to the sweep."""
    # signals are not ours to change there
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        # None: it was not set from Python
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _serve(figure: str, place: Place, link: Connection) -> None:
    """What a process of ``local`` does: one task after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr  # the sweep's own output may be read by a program
    threading.Thread(target=_leave_with_the_sweep, daemon=True).start()
    with suppress(EOFError):
        while True:
            number, jobs = link.recv()
            compute(figure, number, jobs, place, link.send)


def _leave_with_the_sweep() -> None:
    """A sweep that was killed cannot end its processes, and they would go on computing for
    nobody.
    """
    sweep = parent_process()
    if sweep is not None:
        sweep.join()
        os._exit(1)


def cluster(
    figure: str, tasks: Sequence[Sequence[Job]], place: Place, workers: int | None = None
) -> Generator[Event, None, None]:
    """Compute tasks on a Ray cluster, each on one GPU or CPU of it; arguments, events and errors as
    of ``local``.

    The cluster is the one that this process is connected to already, the one of $RAY_ADDRESS, or
    one of this machine alone that ends with the sweep. Its machines need this package, and the data
    sets in the same folder.
    """
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            '--engine ray needs the "ray" extra: pip install "pathcond-paper[ray]"'
        ) from error
    kind = _device(place.device)
    if kind.index is not None:
        raise EngineError(
            f"Ray gives each run a GPU of its own: --device cuda, not {place.device}."
        )
    todo = _Tasks(tasks)
    running = {}
    own = not ray.is_initialized()
    if own:
        _connect(workers)
    try:
        resource = {"cpu": "CPU", "cuda": "GPU"}[kind.type]
        if ray.cluster_resources().get(resource, 0) < 1:
            raise EngineError(
                f"The Ray cluster has no {resource}, which --device {place.device} needs."
            )
        stream = ray.remote(_stream).options(
            num_returns="streaming",
            _generator_backpressure_num_objects=1,  # a task hears when an event of it has arrived
            max_retries=0,  # Ray's own would repeat what is finished
            num_cpus=1,
            num_gpus=int(kind.type == "cuda"),
        )
        while todo.waiting or running:
            while todo.waiting and len(running) < (workers or math.inf):
                task = todo.waiting.popleft()
                running[stream.remote(figure, task.number, task.jobs, place)] = task
            for said in ray.wait(list(running), num_returns=1)[0]:
                try:
                    yield todo.heard(running[said], ray.get(next(said)))
                except StopIteration:
                    del running[said]
                except ray.exceptions.RayError as error:
                    yield todo.note_death(
                        running.pop(said), f"its process was lost ({type(error).__name__})"
                    )
    finally:
        for said in running:
            ray.cancel(said, force=True)
        if own:
            ray.shutdown()


def _connect(workers: int | None) -> None:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise EngineError(
                f"No Ray cluster answers at {address} ($RAY_ADDRESS): {error}."
            ) from error
    ray.init(address=address, log_to_driver=False)


def _stream(figure: str, number: int, jobs: Sequence[Job], place: Place) -> Iterator[Event]:
    """``compute`` as the generator that Ray wants; in a thread, or its progress would wait for its
    results.
    """
    events: Queue[Event] = Queue()

    def send(event: Event) -> None:
        events.put(event)
        events.join()  # go on once the sweep has it, so that no end of this process can lose it

    threading.Thread(target=compute, args=(figure, number, jobs, place, send), daemon=True).start()
    while True:
        event = events.get()
        yield event
        events.task_done()
        if isinstance(event, Ended):
            return


ENGINES: dict[str, Engine] = {"local": local, "ray": cluster}
