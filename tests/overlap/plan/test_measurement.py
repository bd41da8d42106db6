"""What stamps of steps become, against steps whose times are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from overlap.plan.measurement import (
    Lap,
    Passing,
    Sent,
    bare_workload,
    fitted,
    layer_times,
    services,
    thread_costs,
    without_passing,
    workload,
)
from overlap.plan.simulation.events import Cost, Operation, Wire
from overlap.plan.simulation.workload import Costs

LAYER_OF = {0: 0, 1: 0, 2: 1}  # two parameters, then one


def lap(begun: float = 100.0) -> Lap:
    """10 s before forward, of which 4 wait; layers of 2 and 3 s; backward of 5 and 6 s; a second and more before step()."""
    at = begun
    return Lap(
        begun=at,
        used=[(0, at + 10), (1, at + 10.5), (2, at + 12), (0, at + 12.5)],
        left=[at + 15],
        waits=[(at + 2, at + 6)],
        gradients=[(2, at + 20, at + 20.5), (1, at + 26, at + 26.25), (0, at + 26.5, at + 26.75)],
        stepping=at + 28,
        ended=at + 30,
    )


def test_a_step_of_two_layers() -> None:
    times = layer_times([lap()], LAYER_OF, 2)
    assert times is not None
    assert times.forward == (2.0, 3.0)
    assert times.backward == (5.5 + 0.25, 5.0)  # the loss counts to the layer whose gradient is first
    assert times.hooks == (0.5, 0.5)
    assert (times.before, times.between, times.after) == (6.0, 0.0, 1.25)
    assert times.computed == pytest.approx(6.0 + 1.25 + 5.0 + 10.75)


def test_waits_inside_a_layer_are_not_its_own() -> None:
    one = lap()
    one.waits.append((112.5, 114.0))
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    assert times.forward == (2.0, 1.5)


def test_gates_are_ours_and_not_the_layers_own() -> None:
    """A gate that waits: the wait counts to nobody. One in backward, as of recomputation, stands with the hooks."""
    one = lap()
    one.waits.append((112.5, 114.0))
    one.gates += [(112.25, 114.25), (113.0, 114.75), (123.0, 123.5), (105.0, 106.5)]
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    assert times.forward == (2.0, 3.0 - 2.5)
    assert times.gates == (0.0, 1.0)
    assert times.backward == (5.5 + 0.25 - 0.5, 5.0)
    assert times.hooks == (0.5 + 0.5, 0.5)
    assert times.before == 6.0 - 0.5


@pytest.mark.parametrize("kind", ["waits", "issues"])
def test_a_hook_that_issues_or_waits_is_charged_for_what_is_left(kind: str) -> None:
    one = lap()
    getattr(one, kind).append((120.125, 120.375))
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    assert times.hooks == (0.5, 0.25)
    assert times.backward == (5.75, 5.0)


def test_torchs_way_to_gates_and_hooks_is_ours() -> None:
    times = layer_times([lap()], LAYER_OF, 2)
    assert times is not None
    own = without_passing(times, [2, 1], Passing(module=0.5, parameter=0.25, gradient=0.125))
    assert own.forward == (1.0, 2.25)
    assert own.gates == (1.0, 0.75)
    assert own.backward == (5.5, 4.875)
    assert own.hooks == (0.75, 0.625)
    most = without_passing(times, [2, 1], Passing(module=50.0, gradient=50.0))
    assert most.forward == (1.0, 1.5)
    assert most.backward == (2.875, 2.5)


def test_of_several_passes_the_first_forward_and_the_last_backward_count() -> None:
    one = lap()
    one.used += [(0, 121.0), (2, 122.0)]
    one.left.append(124.0)
    one.gradients += [(2, 125.0, 125.0), (1, 126.0, 126.0), (0, 126.5, 126.5)]
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    assert times.forward == (2.0, 3.0)
    assert times.backward == (1.5, 1.0)
    assert times.between == 9.0  # from the end of the first forward to that of the last one


def test_waits_between_forward_and_backward_are_no_computation() -> None:
    one = lap()
    one.left.append(117.0)  # another pass, or what follows the model
    one.waits.append((115.5, 116.0))
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    assert times.between == 1.5


def test_medians_and_steps_without_a_batch() -> None:
    slow = lap()
    slow.used = [(slot, when - (5 if slot == 0 and when == 110 else 0)) for slot, when in slow.used]
    times = layer_times([lap(), slow, lap(), Lap()], LAYER_OF, 2)
    assert times is not None
    assert times.forward == (2.0, 3.0)
    assert layer_times([Lap(), Lap()], LAYER_OF, 2) is None


def test_operations_share_the_links_and_what_they_cannot_fill() -> None:
    def one(lane: int, issued: float, ended: float, most: float, halves: int = 1) -> Sent:
        return Sent("reduce", lane, 100, 100, halves, lane, issued, ended, most)

    def seconds(*sent: Sent, start: float = 0.0) -> list[float]:
        return [took for took, _ in services(sent, start)]

    assert seconds(one(0, 0.0, 4.0, 0.5)) == [2.0]
    assert seconds(one(0, 0.0, 4.0, 0.5), one(1, 0.0, 4.0, 0.5)) == [2.0, 2.0]  # in different directions
    assert seconds(one(0, 0.0, 6.0, 1.0), one(1, 2.0, 4.0, 1.0)) == [5.0, 1.0]
    assert seconds(one(0, 0.0, 4.0, 0.25), one(1, 0.0, 4.0, 1.0)) == [1.0, 3.0]
    assert seconds(one(0, 1.0, 1.0, 1.0)) == [0.0]
    assert seconds(one(0, 0.0, 4.0, 0.5), start=1.0) == [1.5]
    assert seconds(one(0, 0.0, 4.0, 0.5, halves=2), start=1.0) == [1.0]  # an all-reduce starts twice
    assert seconds(one(0, 0.0, 0.5, 1.0), start=1.0) == [0.0]
    assert seconds(one(0, 0.0, 6.0, 1.0), one(1, 2.0, 5.0, 1.0), start=1.0) == [
        4.0,
        1.0,
    ]  # 1 to 3 and 5 to 6, and half of 2


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_what_a_simulation_sends_is_measured_as_what_it_was(start: float) -> None:
    """Two lanes of operations of unequal shares: their spans, read as stamps, give back what each takes alone."""
    wire, costs, most = Wire(), [0.5, 1.0, 0.25, 2.0, 0.75], [0.5, 0.75, 1.0, 0.6, 0.5]
    for place, (cost, share) in enumerate(zip(costs, most, strict=True)):
        wire.send(str(place % 2), Operation(str(place), Cost(start, cost), most=share))
    while wire.busy:
        wire.advance(math.inf)
    by_place = sorted(wire.spans, key=lambda span: int(span.label))
    sent = [
        Sent("reduce", place, 1, 1, 1, place % 2, 0.0, span.ended, most[place]) for place, span in enumerate(by_place)
    ]
    assert [took for took, _ in services(sent, start)] == pytest.approx(costs)


def test_an_operation_begins_when_those_before_it_are_over() -> None:
    sent = [
        Sent("reduce", 0, 100, 100, 1, 0, issued=0.0, ended=4.0),
        Sent("reduce", 1, 100, 100, 1, 0, issued=1.0, ended=6.0),
        Sent("reduce", 2, 100, 100, 1, 1, issued=6.0, ended=7.0),  # another lane
        Sent("gather", 0, 100, 100, 1, 0, issued=8.0, ended=9.0),
        Sent("reduce", 3, 100, 100, 1, 0, issued=9.0, ended=11.0),
    ]
    assert services(sent, 0.0) == [(4.0, False), (2.0, True), (1.0, False), (1.0, False), (2.0, False)]


def test_the_network_is_fitted_to_operations_that_were_queued() -> None:
    pace, start = 2e-9, 1e-4

    def one(kind: str, nbytes: int, wire: int, halves: int = 1) -> tuple[Sent, float]:
        return Sent(kind, 0, nbytes, wire, halves, 0, 0.0, 0.0), halves * pace * wire

    pairs = [one("reduce", 10**6, 5 * 10**5), one("reduce", 10**6, 5 * 10**5, 2), one("gather", 10**6, 10**6)]
    quick = Sent("reduce", 0, 10**6, 5 * 10**5, 1, 0, 0.0, 0.0)  # was not queued: buffers took it
    sent, seconds = [quick, *(sent for sent, _ in pairs)], [1e-5, *(took for _, took in pairs)]
    network = fitted(4, sent, seconds, [False, True, True, True], start)
    assert network.reduce == pytest.approx(pace / 2)  # by the byte of the bucket: gradients travel in half of them
    assert network.gather == pytest.approx(pace)
    assert network.all_reduce(10**6).seconds == pytest.approx(2 * start + 10**6 * pace)
    assert fitted(4, sent[:1], [1e-3], [False], 0.0).reduce > 0  # none was queued: all count
    assert fitted(4, [], [], [], start).all_gather(10**6).seconds == start
    assert fitted(4, sent[:1], [math.inf], [True], start).reduce == 0
    assert fitted(4, [Sent("reduce", 0, 0, 0, 1, 0, 0.0, 0.0)], [1e-5], [True], start).reduce == 0  # of empty tensors


def test_the_pace_is_that_of_the_larger_operations() -> None:
    """What small ones take is mostly their start, of which a probe says only what is usual."""
    took = {10**3: 1e-3, 10**6: 2e-3}
    sent = [Sent("reduce", 0, nbytes, nbytes, 1, 0, 0.0, 0.0) for nbytes in (10**3, 10**3, 10**6, 10**6)]
    network = fitted(2, sent, [took[one.nbytes] for one in sent], [True] * 4, 0.0)
    assert network.reduce == pytest.approx(2e-9)


def test_costs_of_the_thread_from_gaps_between_gathers() -> None:
    one = lap()
    sent = [Sent("reduce", bucket, 8000, 8000, 1, 0, 120.0, 121.0) for bucket in range(3)]
    sent += [
        Sent("gather", 2, 8000, 8000, 1, 0, issued=128.1, ended=129.0),
        Sent("gather", 1, 8000, 8000, 1, 0, issued=128.2, ended=129.0),
        Sent("gather", 0, 8000, 8000, 1, 0, issued=128.3, ended=129.0),
    ]
    per_byte, handling = thread_costs(sent, [one], {0: 4000, 1: 4000, 2: 4000}, 1e-3)
    assert handling == pytest.approx(2 * (1e-3 + 5e-5))
    assert per_byte * 4000 + handling / 2 == pytest.approx(0.1)
    assert thread_costs([], [one], {}, 1e-3) == (0.0, 2e-3)


def test_waiting_for_a_reduction_is_no_cost_of_an_update() -> None:
    shares = dict.fromkeys(range(3), 4000)
    sent = [Sent("reduce", bucket, 8000, 8000, 1, 0, 120.0, 128.4 - bucket / 10) for bucket in (2, 1, 0)]
    sent += [Sent("gather", bucket, 8000, 8000, 1, 0, 128.45 - bucket / 10, 129.0) for bucket in (2, 1, 0)]
    per_byte, handling = thread_costs(sent, [lap()], shares, 1e-3)
    assert per_byte * 4000 + handling / 2 == pytest.approx(0.05)  # from the end of a reduction to the next operation


def test_a_workload_has_what_is_around_forward() -> None:
    times = layer_times([lap()], LAYER_OF, 2)
    assert times is not None
    work = workload(times, [[4, 8], [12]], ["a", "b"])
    assert [layer.name for layer in work.layers] == ["before forward", "a", "b", "between forward and backward"]
    assert [layer.nbytes for layer in work.layers] == [0, 12, 12, 0]
    assert sum(layer.forward + layer.backward for layer in work.layers) == pytest.approx(times.computed + 1.0)


def test_what_is_ours_is_in_the_simulation_and_not_in_the_bare_workload() -> None:
    one = lap()
    one.gates.append((111.0, 111.25))
    times = layer_times([one], LAYER_OF, 2)
    assert times is not None
    times = replace(times, handling=0.5, update=3.0)
    full, bare = (make(times, [[4, 8], [12]], ["a", "b"]) for make in (workload, bare_workload))
    assert [layer.forward for layer in full.layers[1:3]] == [2.0, 3.0]
    assert [layer.forward for layer in bare.layers[1:3]] == [1.75, 3.0]
    assert [layer.backward for layer in full.layers[1:3]] == [5.75 + 0.5, 5.0 + 0.5]
    assert [layer.backward for layer in bare.layers[1:3]] == [5.75, 5.0]
    assert full.costs == Costs(per_tensor=0.0, per_bucket=0.5, update=3.0)
    assert bare.costs == Costs(per_tensor=0.0, per_bucket=0.0, update=3.0)
