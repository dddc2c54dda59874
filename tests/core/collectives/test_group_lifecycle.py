"""The beginning and end of groups: teams, generations, scripts, adopted groups, forks, deaths, exits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

PROLOGUE = """
    import time, threading
    import torch.distributed as dist
    from distnb.collectives.group.memberships import memberships
    from distnb.topology import Device, Team
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cpu, address, port = Device("cpu"), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    def team(generation, engines=None):
        engines = engines or tuple(range(size))
        return Team(engines, (cpu,) * len(engines), generation, address, port)
    def sum_of(value):
        tensor = torch.tensor([float(value)])
        dist.all_reduce(tensor)
        return tensor.item()
"""


def run(program: str, n: int, *, env: Mapping[str, str] | None = None, **options):
    return run_ranks(PROLOGUE + program, n, env={"DISTNB_TEST_WHOLE_END": "1", **(env or {})}, **options)


def results(program: str, n: int, **options):
    return [rank.check().result for rank in run(program, n, **options)]


def test_teams_coexist_and_switching_between_them_is_cheap():
    program = """
    from distnb.collectives.group.forming import Forming
    engine, result, formed, form = rank, {}, [], Forming.run
    def noted(forming):
        formed.append(forming.communicator.group.label)
        return form(forming)
    Forming.run = noted
    teams = {"ab": (0, 1), "bc": (1, 2), "abc": (0, 1, 2)}
    mine = [name for name, engines in teams.items() if engine in engines]
    subgroups = {}
    def enter(name, generation):
        t = team(generation, teams[name])
        return memberships.join(t, t.rank_of(engine), cpu)
    for turn in range(30):
        for name in mine:
            group = enter(name, 7)
            assert group.size == dist.get_world_size() == len(teams[name]) and os.environ["RANK"] == str(group.rank)
            if turn == 0:
                subgroups[name] = dist.new_group([0, 1])
            if group.rank < 2:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=subgroups[name])
                assert tensor.item() == 2
            assert sum_of(1) == len(teams[name])
        result.setdefault("formed", len(formed))
    result["formed in the end"] = len(formed)
    # One team goes on to a new generation; the others follow later, or never.
    if engine != 0:
        enter("bc", 8)
        assert sum_of(2) == 4
    group = enter("abc", 8)
    result["sum"] = sum_of(1)
    if group.rank < 2:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=subgroups["abc"])  # it belongs to this team, and connects again
        result["part"] = tensor.item()
    """
    found = results(program, 3)
    assert [each["sum"] for each in found] == [3, 3, 3]
    assert [each.get("part") for each in found] == [2, 2, None]
    assert [each["formed"] for each in found] == [4, 6, 3], "each team, and the part of it that this replica is in"
    assert [each["formed in the end"] for each in found] == [4, 6, 3], "a switch opens no connection"


def test_ddp_and_subgroups_made_before_an_abort_remain_usable():
    program = """
    from tests.core.collectives.group_cases import aborted_soon
    group = memberships.join(team(0), rank, cpu)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    part = dist.new_group([0, 1])
    model(torch.ones(1, 4)).sum().backward()
    try:
        with aborted_soon("enough"):
            dist.recv(torch.zeros(1), 1 - rank)
    except BaseException as error:
        result = [type(error).__name__]
    try:
        dist.barrier()
    except BaseException as error:
        result.append(str(error))
    again = memberships.join(team(1), rank, cpu)
    model.zero_grad()
    model(torch.ones(1, 4) * (rank + 1)).sum().backward()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=part)
    result += [model.module.weight.grad[0, 0].item(), tensor.item(), again is group]
    """
    assert results(program, 2) == [["ProgramAborted", "enough", 1.5, 2.0, False]] * 2


def test_an_abort_ends_a_join():
    program = """
    from distnb.errors import CollectiveError, ProgramAborted
    result = []
    if rank == 0:
        def strike():
            while memberships.joining is None:
                time.sleep(0.01)
            memberships.abort("no more")
        threading.Thread(target=strike).start()
        try:
            memberships.join(team(0), rank, cpu)
        except ProgramAborted as error:
            result.append(str(error))
        try:
            memberships.join(team(1), rank, cpu, timeout_s=0.3)
        except CollectiveError as error:
            result.append(str(error))
    memberships.join(team(2), rank, cpu)
    result.append(sum_of(1))
    """
    first, second = results(program, 2)
    assert first[0] == "no more"
    assert "did not come: 1" in first[1]
    assert first[2] == second[0] == 2


def test_a_single_replica_forms_a_group():
    program = """
    group = memberships.join(team(0), rank, cpu)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    result = [sum_of(3), group.all_gather_object("x"), [t.tolist() for t in group.all_gather_uneven(torch.ones(2))]]
    """
    assert results(program, 1) == [[3, ["x"], [[1, 1]]]]


def test_a_late_failure_of_an_earlier_generation_does_not_affect_the_next():
    program = """
    from distnb.errors import CollectiveError
    earlier = memberships.join(team(0), rank, cpu).process_group.communicator
    current = memberships.join(team(1), rank, cpu).process_group.communicator
    earlier.fail(CollectiveError("a thread found it just before"))
    result = sum_of(1), current.failure
    """
    assert results(program, 1) == [(1, None)]


def test_torch_may_name_the_backend_of_a_subgroup():
    # Torch 2.14 does, while 2.13 does not report it.
    program = """
    group = memberships.join(team(0), rank, cpu).process_group
    part = group.new_group([0, 1], timeout=None, pg_options=None, group_name="part", group_desc="it", backend="gloo")
    tensor = torch.ones(1)
    part.allreduce(tensor).wait()
    result = tensor.item(), part.group_desc
    """
    assert results(program, 2) == [(2, "it")] * 2


def test_replicas_of_one_machine_stop_listening_once_they_have_met():
    program = """
    import psutil
    group = memberships.join(team(0), rank, cpu)
    group.barrier()
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    result = sorted(set(listening))
    group.barrier()
    """
    assert results(program, 2) == [[]] * 2


def test_forked_children_are_not_replicas():
    program = """
    group = memberships.join(team(0), rank, cpu)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    result = os.read(reading, 1000).decode()
    os.waitpid(child, 0)
    assert sum_of(1) == 2
    """
    assert all("forked child" in text for text in results(program, 2))


def test_a_killed_replica_frees_the_others_even_if_its_children_live():
    program = """
    import signal
    from pathlib import Path
    folder = Path(os.environ["DISTNB_TEST_RESULT"]).parent
    memberships.join_from_env()
    sum_of(1)
    if rank == 1:
        if os.fork() == 0:
            while len(list(folder.glob("freed*"))) < 2:
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        sum_of(1)
    except Exception as error:
        result = type(error).__name__, str(error)
        folder.joinpath(f"freed{rank}").touch()
    """
    ranks = run(program, 3)
    assert ranks[1].returncode == -9
    for rank in (ranks[0], ranks[2]):
        name, text = rank.check().result
        assert name == "CollectiveError"
        assert "lost" in text


# -- scripts ----------------------------------------------------------------------------------------------------------


def test_a_script_joins_and_exits_cleanly():
    program = """
    group = memberships.join_from_env()
    assert memberships.join_from_env() is group is memberships.current()
    result = (group.rank, group.size, sum_of(1), os.environ["RANK"])
    """
    ranks = run(program, 2)
    assert [rank.check().result for rank in ranks] == [(0, 2, 2, "0"), (1, 2, 2, "1")]
    assert not any(rank.stderr for rank in ranks), [rank.stderr for rank in ranks]


def test_a_group_that_the_program_initialised_is_adopted():
    program = """
    dist.init_process_group("gloo")
    before = dist.group.WORLD
    sum_of(1)
    group = memberships.join_from_env()
    assert dist.group.WORLD is group.process_group and sum_of(1) == 2
    assert memberships.join_from_env() is group
    result = sum_of(1)
    """
    assert results(program, 2) == [2, 2]


def test_a_contradicting_init_process_group_is_refused():
    program = """
    memberships.join_from_env()
    try:
        dist.init_process_group("gloo", world_size=5, rank=rank)
    except Exception as error:
        result = str(error)
    """
    assert all("world_size=5" in text and f"rank {rank} of 2" in text for rank, text in enumerate(results(program, 2)))


def test_the_error_without_an_environment_names_the_cure():
    program = """
    for name in ("RANK", "MASTER_ADDR"):
        del os.environ[name]
    try:
        memberships.join_from_env()
    except Exception as error:
        result = str(error)
    """
    assert "RANK, MASTER_ADDR is not set" in results(program, 1)[0]


def test_a_script_that_ends_early_is_named_by_the_others():
    program = """
    memberships.join_from_env()
    if rank == 0:
        sum_of(1)
    """
    first, second = run(program, 2)
    assert first.returncode == 1
    assert "replica 1 finished its program after 0 collectives" in first.stderr
    assert second.returncode == 0


def test_a_failed_script_is_not_a_mismatch():
    program = """
    memberships.join_from_env()
    if rank == 1:
        raise ValueError("mine")
    sum_of(1)
    """
    first, second = run(program, 2)
    assert "ValueError: mine" in second.stderr
    assert first.returncode == 1
    # Its connections close with its process, which must not be the only report.
    assert "CollectiveError: Replica 1 ended with an error" in first.stderr
    assert "Mismatch" not in first.stderr


@pytest.mark.parametrize(
    "traffic",
    [
        "dist.barrier()",
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in ("dist.recv(torch.zeros(1), 1 - rank)", "future.wait()")
        ),
    ],
)
def test_the_exit_after_an_abort_is_clean(traffic):
    program = f"""
    memberships.join(team(0), rank, cpu)
    sum_of(1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        threading.Timer(0.2, memberships.abort, ["enough"]).start()
        try:
            {traffic}
        except (BaseException) as error:
            result = type(error).__name__
        store.set("aborted", "yes")
    else:
        store.wait(["aborted"])  # one that ends earlier is missed, whatever becomes of the abort
    """
    ranks = run(program, 2)
    assert ranks[0].check().result in ("ProgramAborted", "RuntimeError")
    ranks[1].check()


@pytest.mark.parametrize("last", ["", "memberships.join(team(1), rank, cpu)"])
def test_the_exit_waits_for_callbacks_of_a_future(last):
    # It runs on Gloo's own thread. If the interpreter had ended, it would end that thread and the process.
    program = f"""
    memberships.join(team(0), rank, cpu)
    sum_of(1)
    begun = threading.Event()
    def follow(future):
        begun.set()
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            torch.ones(1000).sum()
    following = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(follow)
    begun.wait(20)
    {last}
    """
    for rank in run(program, 2):
        rank.check()
        assert "terminate" not in rank.stderr


def test_ctrl_c_ends_a_wait():
    program = """
    import _thread
    memberships.join(team(0), rank, cpu)
    sum_of(1)
    result = None
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            threading.Timer(0.3, _thread.interrupt_main).start()
            sum_of(1)
        except KeyboardInterrupt:
            result = "interrupted"
        store.set("struck", "yes")
    else:
        store.wait(["struck"])
    """
    assert results(program, 2) == ["interrupted", None]


# -- replicas on several machines -------------------------------------------------------------------------------------


def test_replicas_without_shared_memory_form_a_group():
    program = """
    from distnb.collectives.shared_memory import host
    from tests.core.collectives import group_cases
    host.identity = lambda: f"machine {os.environ['RANK']}"
    good = ["everything", "own_lines", "far_ahead", "training_with_ddp"]
    bad = ["other_operation", "other_shape_known", "other_dtype", "swapped_order", "fewer_calls", "whole_against_part"]
    result = group_cases.run([*good, *bad, "sum_after_all"]), good, bad
    """
    for rank, (ended, good, bad) in enumerate(results(program, 2, env={"GLOO_SOCKET_IFNAME": "lo"}, timeout_s=100)):
        assert not any(ended[name].error for name in good), {name: ended[name] for name in good}
        for name in bad:
            if (name, rank) != ("fewer_calls", 1):
                assert ended[name].error == "CollectiveMismatchError", ended[name]
        assert ended["sum_after_all"].value == 2


def test_an_interrupted_formation_does_not_affect_later_ones():
    """End one replica just before it connects, and another while one of its threads waits for it."""
    program = """
    import signal
    import threading
    import time
    import torch
    import torch.distributed as dist
    from distnb.collectives.group.memberships import memberships
    from distnb.collectives.group.forming import Forming
    from distnb.topology import Device
    from tests.core.collectives.group_cases import Meeting, team

    class Interrupted(Exception):
        pass

    def interrupted(*anything):
        raise Interrupted

    def interrupt_when_it_waits(before):
        while not any(thread.name == "distnb-form" for thread in set(threading.enumerate()) - before):
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    meeting, result = Meeting(), []
    signal.signal(signal.SIGALRM, interrupted)
    make = Forming._make_backends
    for generation in (1, 3):
        if meeting.rank == 1:
            Forming._make_backends = interrupted
        else:
            threading.Thread(target=interrupt_when_it_waits, args=(set(threading.enumerate()),)).start()
        try:
            memberships.join(team(generation), meeting.rank, Device("cpu"))
        except Interrupted:
            result.append("interrupted")
        Forming._make_backends = make
        meeting.meet(str(generation))
        memberships.join(team(generation + 1), meeting.rank, Device("cpu"))
        total = torch.ones(1)
        dist.all_reduce(total)
        result.append(total.item())
    """
    for rank in run_ranks(program, 2):
        assert rank.check().result == ["interrupted", 2.0, "interrupted", 2.0]


def test_an_interrupt_at_the_start_of_an_operation_does_no_harm():
    """End a program when no one holds an operation's work and Gloo may be busy with it: waiting for it would hang."""
    program = """
    group = memberships.join(team(0), rank, cpu)
    sum_of(1)
    backends, busy, over = group.process_group.communicator.backends.backends, threading.Event(), threading.Event()
    gloo, store = backends["cpu"], dist.distributed_c10d._get_default_store()

    class Interrupted:
        def __getattr__(self, name):
            return getattr(gloo, name)
        def allreduce(self, *args):
            if rank == 1:
                store.wait(["begun"])
            future = gloo.allreduce(*args).get_future()
            if rank == 0:
                future.then(lambda future: busy.set() or over.wait(60))  # on Gloo's thread, once replica 1 has come
                store.set("begun", "yes")
                busy.wait(10)  # an operation of Gloo's whose other side was aborted may never end: as good here
            raise KeyboardInterrupt

    backends["cpu"] = Interrupted()
    try:
        dist.all_reduce(torch.ones(300_000))
    except KeyboardInterrupt:
        memberships.abort("the user stops")
    del gloo, group
    backends = None
    memberships.join(team(1), rank, cpu)
    result = sum_of(1), over.is_set()
    over.set()
    """
    assert results(program, 2) == [(2.0, False)] * 2
