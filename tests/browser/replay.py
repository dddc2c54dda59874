"""A replacement for the session that replays events of replicas, without engines and without torch.

In a kernel, `replay.install(replicas=2)` makes `%%distribute mirrored` cells run in a function of this module that
plays a training. So the front end can be examined and tested alone and quickly.
"""

from __future__ import annotations

import base64
import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

from distnb.notebook import compose as sessions
from distnb.notebook.engines import EngineStatus
from distnb.notebook.programs.supervisor import EventHub
from distnb.topology import Device, Team
from distnb.wire.messages import Display, Live, Output, ProgramEnded, Status, TelemetrySample


class ReplaySession:
    """The part of `Session` that the magics use."""

    def __init__(self, replicas: int) -> None:
        self.events = EventHub()
        self.replicas = replicas
        self._programs = 0
        self.played: list[tuple[str, Any, dict[str, Any]]] = []
        self.cells = SimpleNamespace(run=self._play, latest_times=None)
        self.calls = SimpleNamespace(finish=lambda: None, latest_strategy="mirrored")
        self.engines = SimpleNamespace(save_names=lambda: None)
        self.programs = SimpleNamespace(inspecting=nullcontext, unshown=frozenset(), failure=None)
        self.namespace = SimpleNamespace(localise=lambda source: nullcontext(()))

    def status(self) -> tuple[Any, ...]:
        return tuple(
            EngineStatus(engine=i, device=f"cpu:{i}", state="idle", pid=0, host="") for i in range(self.replicas)
        )

    def work(self) -> dict[str, tuple[str, str]]:
        return {}

    alive = True
    name = ""
    tasks: Mapping[int, Any] = MappingProxyType({})
    latest_program = property(lambda self: self._programs)

    def flush_events(self) -> bool:
        return True

    def interrupt(self) -> bool:
        return False

    def stop(self) -> None:
        return

    def _play(self, source: str, spec: Any, **keywords: Any) -> None:
        """Play the recording that a comment `# replay: NAME` in the cell names."""
        self.played.append((source, spec, keywords))
        self._programs += 1
        team = Team(
            engines=tuple(range(self.replicas)),
            devices=tuple(Device("cpu", i) for i in range(self.replicas)),
            generation=1,
            store_host="",
            store_port=0,
        )
        name = source.partition("# replay:")[2].split("\n", 1)[0].strip() or "nothing"
        arguments = name.split()
        self.events.publish(Status(program=self._programs, state="started", team=team))
        error: list[BaseException] = []

        def play() -> None:
            try:
                for event in getattr(Player(self._programs, self.replicas), arguments[0])(*map(float, arguments[1:])):
                    self.events.publish(event)
            except BaseException as raised:
                error.append(raised)
            for engine in range(self.replicas):
                self.events.publish(
                    ProgramEnded(
                        engine=engine, program=self._programs, status="error" if error else "ok", summary=str(*error)
                    )
                )

        thread = threading.Thread(target=play)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
        self.events.publish(Status(program=self._programs, state="ended", team=team, text="failed" if error else ""))
        if error:
            error[0]._render_traceback_ = lambda: ["Replica 0 of 2 (cpu:0) raised:", f"ValueError: {error[0]}"]  # type: ignore[attr-defined]
            raise error[0]


class Player:
    """Recorded cells: each method yields a cell's events at their times."""

    def __init__(self, program: int, replicas: int) -> None:
        self.program = program
        self.replicas = replicas

    def nothing(self) -> Iterator[Any]:
        return iter(())

    def lines(self) -> Iterator[Any]:
        for replica in range(self.replicas):
            yield self.text(replica, "hello\n")
            yield self.text(replica, f"I am {replica}\n")

    def train(self, seconds: float = 3.0, fail: float = 0.0) -> Iterator[Any]:
        """Play a training with about 200 steps a second, and then slowly while the file `.held` exists."""
        steps, step = int(seconds * 50), 0
        while step < steps or os.path.exists(".held"):
            step += 1
            for replica in range(self.replicas):
                loss = 2.3 * math.exp(-4 * step / steps) + 0.05 * math.sin(step * 1.7)
                local = loss + 0.08 * math.sin(step * 2.3 + 2 * replica)
                yield Live(
                    engine=replica,
                    program=self.program,
                    replica=replica,
                    points=((step, 0, {"loss": loss, "local loss": local, "accuracy": 1 - loss / 2.4}),),
                )
                if step % 10 == 0:
                    yield TelemetrySample(
                        engine=replica,
                        program=self.program,
                        replica=replica,
                        seconds=step * 0.02,
                        steps=step * 4,
                        examples=step * 4 * 16,
                        rss_nbytes=412_000_000 + step * 10_000,
                        device_nbytes=None,
                        where=f"cell 3, line {12 + step % 4}",
                        epochs=((step - 10, (step - 10) // 50),) if step % 50 == 10 else (),
                        reading=((step - 1) // 50, (step - 1) % 50 + 1, 50, None),
                        host_nbytes=16_000_000_000,
                    )
                if step % 50 == 0 and step <= steps:
                    yield self.text(replica, f"epoch {step // 50}\n")
                    yield self.text(replica, f"local loss {local:.4f}\n")
            time.sleep(0.02 if step < steps else 0.2)
        if fail:
            raise ValueError("wrong shape")

    def compare(self, seconds: float = 3.0) -> Iterator[Any]:
        """Play two runs, one after the other. The second one explodes and ends with NaN."""
        steps = int(seconds * 50)
        for step in range(1, 2 * steps + 1):
            run, at = ("rate=0.1", step) if step <= steps else ("rate=10", step - steps)
            for replica in range(self.replicas):
                loss = 2.3 * math.exp(-4 * at / steps) + 0.1 * math.sin(step * 2.3 + 2 * replica) ** 2
                if run == "rate=10" and at > steps // 2:
                    loss = 2.0 ** (at - steps // 2) if at < steps * 0.8 else math.nan
                values = {"loss": loss, "rate of learning": 0.1}
                yield Live(engine=replica, program=self.program, replica=replica, points=((step, 0, values),), run=run)
            time.sleep(0.02)

    def progress(self, seconds: float = 2.0) -> Iterator[Any]:
        for percent in range(0, 101, 2):
            for replica in range(self.replicas):
                bar = "#" * (percent // 10)
                yield self.text(replica, f"\r{percent:3d}%|{bar:10}| {percent}/100 [{replica}it/s]", "stderr")
            time.sleep(seconds / 50)
        for replica in range(self.replicas):
            yield self.text(replica, "\n", "stderr")

    def figures(self, equal: float = 0.0) -> Iterator[Any]:
        for replica in range(self.replicas):
            color = (37, 99, 235) if equal or replica % 2 == 0 else (234, 88, 12)
            yield Display(
                engine=replica,
                program=self.program,
                replica=replica,
                data={"image/png": png(*color), "text/plain": "<Figure size 120x80>"},
            )

    def flood(self, seconds: float = 2.0) -> Iterator[Any]:
        end, line = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for replica in range(self.replicas):
                yield self.text(replica, "".join(f"line {line + i}\n" for i in range(2_000)))
            line += 2_000
            time.sleep(0.05)
        for replica in range(self.replicas):
            yield self.text(replica, "the end\n")

    def text(self, replica: int, text: str, stream: Any = "stdout") -> Output:
        return Output(engine=replica, program=self.program, replica=replica, stream=stream, text=text)


def png(red: int, green: int, blue: int, width: int = 120, height: int = 80) -> str:
    """Return a picture of one colour."""
    rows = (b"\0" + bytes((red, green, blue)) * width) * height

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def install(replicas: int = 2) -> ReplaySession:
    """Install the replacement as the running session."""
    session = ReplaySession(replicas)
    sessions._session = session  # type: ignore[assignment]
    sessions._follow(session)  # type: ignore[arg-type]
    return session
