"""Meeting the other ranks: rank 0's word first, through the rendezvous store, and only then a process group."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshwright import heartbeat
from meshwright.core.cycles import rare_collection
from meshwright.core.mesh import Mesh
from meshwright.errors import LaunchError, MeshwrightError, PeerLost, RunError
from meshwright.launchers import Launched, launched
from meshwright.launchers.dynamic_cluster import worker
from meshwright.launchers.environment import DYNAMIC, TORCHRUN
from meshwright.launchers.interfaces import interface_of, interface_to, loopback, port_of, resolve
from meshwright.launchers.meeting_place import file_of
from meshwright.launchers.own_scheduler import place_of
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.communicator import Alone, Communicator, ProcessGroups, leave_at_exit, outlive
from meshwright.runtime.scheduler_store import SchedulerStore, arrived
from meshwright.runtime.stores import FileStore, PrefixStore, Store, TCPStore, put
from meshwright.scheduler.client import FILE as SCHEDULER_FILE

log = logging.getLogger("meshwright")
LOOK_SECONDS = 1.0  # between two looks at whether another rank has failed, while one waits in the store
WORD_SECONDS = 0.005  # between two looks for a word, where a job goes on without the ranks that are lost


def load_compiler() -> None:
    """Load the compiler, a second of work, which torch does with the first optimizer and before the first capture.

    Ranks load it at the same time; else all wait for rank 0 to capture, and then rank 0 for the others to load it."""
    with rare_collection():
        torch.compiler.disable(lambda: None)


def launched_world() -> int:
    """The number of ranks this process was launched with; 1 when it was started by hand."""
    return dist.get_world_size() if dist.is_initialized() else launched().world


def launched_rank() -> int:
    """The number of this process among those."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def check_world(mesh: Mesh) -> None:
    """Raise RunError when the plan is for another number of ranks than were launched."""
    world = launched_world()
    if world != mesh.size:
        raise RunError(
            f"the plan is for {mesh.size} ranks ({mesh}), {world} {'was' if world == 1 else 'were'} launched",
            hint=f"meshwright run --nproc {mesh.size} script.py, or plan for mesh={world}",
        )


def _store(timeout: timedelta) -> tuple[Store, int, int]:
    """Where the ranks meet first, this one's number and how many there are. `meshwright run` names a file, which only
    its user can open; with other launchers it is what ``init_process_group()`` would take."""
    file = heartbeat.store()
    if file is None:
        return _store_elsewhere(launched(), timeout)
    return _store_of(file, "", timeout), int(os.environ["RANK"]), launched_world()


def _store_of(file: Path, prefix: str, timeout: timedelta) -> Store:
    """The store in a file, or, over several machines, what it stands for at the scheduler."""
    scheduler = file.with_name(SCHEDULER_FILE)
    if scheduler.exists():
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        return SchedulerStore.of(scheduler, f"{attempt}/{prefix}", timeout)
    store = FileStore(str(file))
    store.set_timeout(timeout)
    return store


def store_of_generation(folder: Path, number: int, timeout: timedelta) -> Store:
    """Where the ranks meet that are left, or joined by others (`meshwright.heartbeat.generation`)."""
    return _store_of(folder / f"store-{number}", f"generation {number}/", timeout)


def _store_elsewhere(mine: Launched, timeout: timedelta) -> tuple[Store, int, int]:
    """The same where another launcher than ours has started the ranks."""
    if mine.launcher == TORCHRUN:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise LaunchError(
                f"RANK and WORLD_SIZE are set, {missing[0]} is not",
                why="ranks meet at the port of rank 0",
                hint="start all ranks with one launcher: meshwright run, torchrun, mpirun, srun",
            )
        address, port = os.environ["MASTER_ADDR"], port_of(os.environ["MASTER_PORT"], "MASTER_PORT")
        resolve(address, port, "MASTER_ADDR")
        with _port_taken(port):
            return next(rendezvous("env://", timeout=timeout))
    if mine.dealt:
        log.warning(
            "rank %d: Slurm dealt ranks to machines in turn; inner axes of a mesh then cross machines, which costs "
            "time: srun -m block",
            mine.rank,
        )
    name = _interface(mine)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name else ():
        os.environ.setdefault(variable, name)
    if mine.launcher == DYNAMIC:
        own = worker(os.environ)
        store: Store = SchedulerStore(own.place, f"{own.attempt - 1}/", timeout)
    elif not mine.address:
        store = FileStore(str(file_of(mine, timeout.total_seconds())), mine.world)
        store.set_timeout(timeout)
    elif (place := place_of(mine, timeout.total_seconds())) is not None:
        store = SchedulerStore(place, "", timeout)
    else:
        with _port_taken(mine.port):
            store = TCPStore(mine.address, mine.port, mine.world, mine.rank == 0, timeout)
    return store, mine.rank, mine.world


@contextlib.contextmanager
def _port_taken(port: int) -> Iterator[None]:
    """Within it, rank 0 listens. Raises LaunchError where it cannot."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"MASTER_PORT is {port}, and something else listens there",
            why="ranks meet at this port of rank 0's machine",
            hint="another MASTER_PORT on all ranks, or end what listens there",
        ) from None


def _interface(mine: Launched) -> str:
    """The network for tensors: the one through which rank 0 is reached. Raises LaunchError on a rank 0 that is on
    another machine than the launcher says."""
    if mine.launcher == DYNAMIC:
        return interface_of(worker(os.environ).address)
    if mine.alone:
        return loopback()
    if mine.rank:
        return interface_to(mine.address, mine.port)
    name = interface_of(resolve(mine.address, mine.port, "MASTER_ADDR")[0][1])
    if not name:
        raise LaunchError(
            f"rank 0 is not on {mine.address}",
            why="the other ranks would look for it there",
            hint="MASTER_ADDR=HOST, a name or an address by which all machines reach that of rank 0",
        )
    return "" if name == loopback() else name  # a machine may know its own name as a loopback address


class _StoreChannel:
    """Words between ranks over the rendezvous store, before there is a process group."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.gone: Callable[[], bool] | None = None
        self._number = 0
        self._came: dict[str, int] = {}

    def share(self, word: bytes | None) -> bytes:
        """Rank 0's word on every rank."""
        self._number += 1
        key = f"meshwright/word/{self._number}"
        entry = self._begun()
        if word is not None:
            put(self.store, key, word)
            return word
        with heartbeat.waiting(entry):
            return self._get(key)

    def _get(self, key: str) -> bytes:
        """A word that another rank puts into the store. Raises PeerLost once `gone` says that one has gone."""
        while self.gone is not None and not arrived(self.store, [key], WORD_SECONDS):
            self._look("its word")
        return bytes(self.store.get(key))

    def _look(self, what: str) -> None:
        if self.gone is not None and self.gone():
            raise PeerLost("another rank has gone", why=f"this one waited for {what}")

    def _begun(self) -> heartbeat.Entry | None:
        """This rank is here, in the record of what it does."""
        return heartbeat.begun("word of all ranks", tuple(range(self.world)), "before the process groups")

    def collect(self, word: str) -> list[str]:
        """Everybody's word on every rank, through rank 0, so that the store is read as often as there are ranks."""
        key = f"meshwright/collected/{self._number}"
        entry = self._begun()
        if self.rank != 0:
            put(self.store, f"{key}/{self.rank}", word.encode())
            return json.loads(self.share(None))
        with heartbeat.waiting(entry):
            told = [word, *(self._get(f"{key}/{r}").decode() for r in range(1, self.world))]
        return json.loads(self.share(json.dumps(told).encode()))

    def come(self, what: str, seconds: float) -> list[int]:
        """Wait until all ranks have come to something; those that have not within a time. Who was here in vain comes to
        the same place again. A scheduler that is away is waited for as long as a rank: it may be started again."""
        store = self.store
        with store.patient(seconds) if isinstance(store, SchedulerStore) else contextlib.nullcontext():
            return self._come(what, seconds)

    def _come(self, what: str, seconds: float) -> list[int]:
        place = f"meshwright/came/{what}/{self._came.get(what, 0)}"
        keys = [f"{place}/{rank}" for rank in range(self.world)]
        put(self.store, keys[self.rank], b"here")
        entry = heartbeat.begun(what, tuple(range(self.world)), "to come to it", "")
        try:
            with heartbeat.waiting(entry):
                if self.rank == 0:
                    self._wait(keys, seconds, what)
                    put(self.store, f"{place}/all", b"here")
                else:
                    self._wait([f"{place}/all"], seconds, what)
        except PeerLost:
            raise
        except RuntimeError:  # in vain, or the store has gone: then the next line says so
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if missing:
                return missing
            raise
        self._came[what] = self._came.get(what, 0) + 1
        return []

    def _wait(self, keys: list[str], seconds: float, what: str) -> None:
        """Wait for keys as long as no rank has left word that it failed. Raises RuntimeError, of which PeerLost is."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > LOOK_SECONDS:
            self._look(what)
            began = time.monotonic()
            try:
                self.store.wait(keys, timedelta(seconds=LOOK_SECONDS))
                return
            except RuntimeError:
                if (failed := peers.another_failed(what)) is not None:
                    raise failed from None
                if time.monotonic() - began < LOOK_SECONDS / 2:  # the store has gone
                    raise
        # Of no time left a file store would make no limit: it would wait for ever.
        self.store.wait(keys, timedelta(seconds=max(0.01, left)))


class _GroupChannel:
    """The same over a process group that somebody else has made."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        alone = dist.get_backend() == "nccl"  # else it has one for the processor, too
        self._device = torch.device("cuda", torch.cuda.current_device()) if alone else torch.device("cpu")

    def share(self, word: bytes | None) -> bytes:
        """Rank 0's word on every rank."""
        return self._word_of(word or b"", 0)

    def collect(self, word: str) -> list[str]:
        """Everybody's word on every rank."""
        return [self._word_of(word.encode(), rank).decode() for rank in range(self.world)]

    def _word_of(self, word: bytes, source: int) -> bytes:
        """The word of one rank on every rank, as numbers: torch's collectives of objects unpickle what comes."""
        count = torch.tensor([len(word)], device=self._device)
        dist.broadcast(count, src=source)
        data = torch.zeros(int(count), dtype=torch.uint8)
        if self.rank == source and word:
            data = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        data = data.to(self._device)
        if data.numel():
            dist.broadcast(data, src=source)
        return data.cpu().numpy().tobytes()


_store_channel: list[_StoreChannel] = []  # the one of this process: keys must not repeat within a job


def late(what: str, seconds: float) -> list[int]:
    """The ranks that have not come to something that all call, within a time; empty also where there is no store to
    meet at. It comes before the first collective, which would have to be waited for as long as the back end likes."""
    channel = _store_channel[0] if _store_channel else None
    return [] if channel is None else channel.come(what, seconds)


def look_for(gone: Callable[[], bool]) -> None:
    """From now on, who waits for the word of another rank asks whether one has gone, of which the launcher knows."""
    for channel in _store_channel:
        channel.gone = gone


def meet_anew(store: Store, rank: int, world: int, gone: Callable[[], bool]) -> None:
    """From now on the ranks of this job meet in another store, as others in number. `gone`: see `look_for`."""
    _store_channel[:] = [_StoreChannel(store, rank, world)]
    look_for(gone)
    peers.begin_anew(store, rank)
    os.environ["WORLD_SIZE"] = str(world)


class Meeting:
    """The rendezvous of one job: rank 0 computes once for all, and all agree to go on, before any process
    group exists."""

    def __init__(self, timeout: timedelta = timedelta(minutes=30), *, comes: bool = False) -> None:
        """`comes`: this rank was started again and meets the others later; here it is alone."""
        self.timeout = timeout
        self.channel: _StoreChannel | _GroupChannel | None = None
        if comes:
            file, rank = heartbeat.store(), int(os.environ["RANK"])
            raised = None if file is None else file.with_name(f"rank{rank}{heartbeat.RAISED}")
            peers.begin(None, rank, outlive, raised)
        elif _store_channel:
            self.channel = _store_channel[0]
        elif dist.is_initialized():
            self.channel = _GroupChannel()
        elif launched_world() > 1:
            made = _StoreChannel(*_store(timeout))
            _store_channel.append(made)
            file = heartbeat.store()
            raised = None if file is None else file.with_name(f"rank{made.rank}{heartbeat.RAISED}")
            peers.begin(made.store, made.rank, outlive, raised)
            self.channel = made
        self.rank = self.channel.rank if self.channel is not None else 0

    def agree(self, compute: Callable[[], bytes]) -> bytes:
        """Rank 0's bytes on every rank. An error of rank 0 is raised on all."""
        if self.channel is None:
            return compute()
        if self.rank != 0:  # while rank 0 captures
            load_compiler()
        word: bytes | None = None
        if self.rank == 0:
            try:
                with heartbeat.during("capturing and planning", patient=True):
                    word = b"ok" + compute()
            except BaseException as error:
                told = [f"rank 0 failed: {type(error).__name__}: {error}", "", "", ""]
                if isinstance(error, MeshwrightError):
                    told = [error.what, error.why, error.where, error.hint]
                self.channel.share(b"no" + json.dumps(told).encode())
                raise
        answer = self.channel.share(word)
        if self.rank == 0:  # a capture from a cache did without it: now, while the others load it
            load_compiler()
        if answer[:2] == b"no":
            text, why, where, hint = json.loads(answer[2:])
            raise RunError(text, why=why, where=where, hint=hint)
        return answer[2:]

    def confirm(self, problem: str, hint: str = "") -> None:
        """Go on only if no rank has a problem (an empty text). Raises RunError on all ranks when one has, so
        that nobody is left waiting for a rank that has given up."""
        found = next((t for t in self.collect(problem) if t), "")
        if found:
            raise RunError(found, hint=hint)

    def collect(self, word: str) -> list[str]:
        """Everybody's word, by rank, on every rank."""
        if self.channel is None:
            return [word]
        return self.channel.collect(word)

    def connect(self, mesh: Mesh, device: torch.device, *, host: bool = False) -> Communicator:
        """The communicator of a mesh, with the default process group made if there is none. `host`: tensors in the
        host's memory are communicated too."""
        if self.channel is None:
            return Alone(mesh)
        if not dist.is_initialized():
            assert isinstance(self.channel, _StoreChannel)
            backend = "nccl" if device.type == "cuda" else "gloo"
            backend = "cpu:gloo,cuda:nccl" if host and device.type == "cuda" else backend
            store = PrefixStore("meshwright/group", self.channel.store)
            rank, world = self.channel.rank, self.channel.world
            with heartbeat.waiting(heartbeat.begun("making of process groups", tuple(range(world)))):
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world, timeout=self.timeout
                )
            atexit.register(leave_at_exit)
        return ProcessGroups(mesh, self.rank)
