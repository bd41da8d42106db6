"""Simulated schedules against what can be said about them with a pencil, and against each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from overlap.plan.simulation.cores import Cores
from overlap.plan.simulation.events import Cost, Operation, Run, Wire
from overlap.plan.simulation.network import Link, Network, filled
from overlap.plan.simulation.profile import load
from overlap.plan.simulation.schedules import all_reduced, by_priority, decoupled, negotiated
from overlap.plan.simulation.workload import Costs, Layer, Workload, fused, in_one_order, owned, per_tensor

LAYERS = 60
SIZE = 1000  # bytes of a layer

Method = Callable[[Workload, Network], Run]
METHODS: dict[str, Method] = {
    "dear": lambda work, network: decoupled(work, network, fused(work.layers, SIZE)),
    "dear early": lambda work, network: decoupled(work, network, fused(work.layers, SIZE), early=True),
    "dear, few buckets": lambda work, network: decoupled(work, network, fused(work.layers, 6 * SIZE)),
    "dear, half all-reduced": lambda work, network: decoupled(
        work, network, fused(work.layers, 6 * SIZE), whole=range(0, 10, 2)
    ),
    "wfbp": lambda work, network: all_reduced(work, network, per_tensor(work.layers)),
    "ddp": lambda work, network: all_reduced(work, network, in_one_order(work.layers, 6 * SIZE, SIZE)),
    "horovod": lambda work, network: negotiated(work, network, threshold=6 * SIZE, cycle=1e-3),
    "bytescheduler": lambda work, network: by_priority(work, network, partition=SIZE, credit=2 * SIZE),
}

# Of each: operations of a bucket that the thread handles in a step, and which share of all bytes it updates.
THREAD = {
    "dear": (LAYERS, 1 / 2),
    "dear early": (LAYERS, 1 / 2),
    "dear, few buckets": (10, 1 / 2),
    "dear, half all-reduced": (10, 3 / 4),
    "wfbp": (LAYERS, 1),
    "ddp": (11, 1),
    "horovod": (1, 1),
    "bytescheduler": (LAYERS, 1),
}


def even(compute: float = 1.0, **options: object) -> Workload:
    each = compute / LAYERS / 3
    layers = tuple(Layer(str(number), each, 2 * each, (SIZE,)) for number in range(LAYERS))
    return Workload(layers, **options)  # type: ignore[arg-type]


def two(wire: float, alpha: float = 0.0) -> Network:
    """Two hosts on which an all-reduce of all bytes takes `wire` seconds: each half moves half of them."""
    return Network(2, Link(alpha, wire / (LAYERS * SIZE)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [0.0, 0.33, 1.0, 2.0])
def test_nothing_is_faster_than_computation_and_wire(method: str, ratio: float) -> None:
    found = METHODS[method](even(), two(ratio))
    assert found.step >= max(1.0, ratio) * (1 - 1e-9)
    if not ratio:
        assert found.step == pytest.approx(1.0, abs=2e-3)
        assert found.waited < 2e-3


@pytest.mark.parametrize("method", METHODS)
def test_what_is_waited_for_is_what_is_not_hidden(method: str) -> None:
    work = even(costs=Costs(per_tensor=1e-4, per_bucket=2e-4, update=1e-7))
    found = METHODS[method](work, two(1.0))
    handled, updated = THREAD[method]
    thread = 1.0 + LAYERS * 1e-4 + handled * 2e-4 + updated * LAYERS * SIZE * 1e-7
    assert found.step - found.waited == pytest.approx(thread)
    assert found.waits


def test_one_bucket_hides_nothing() -> None:
    # Its reduction starts when backward has ended, and forward when it is gathered.
    work = even()
    assert decoupled(work, two(1.0), fused(work.layers, LAYERS * SIZE)).step == pytest.approx(2.0)
    assert all_reduced(work, two(1.0), in_one_order(work.layers, 1e9, 1e9)).step == pytest.approx(2.0)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4 / 3, 2.0])
def test_plain_dear_comes_near_its_two_phases(ratio: float) -> None:
    # Forward against all-gathers and backward against reduce-scatters, besides a bucket at each end.
    bound = max(1 / 3, ratio / 2) + max(2 / 3, ratio / 2)
    found = METHODS["dear"](even(), two(ratio)).step
    assert bound * (1 - 1e-9) <= found <= bound + 2.5 * ratio / LAYERS


@pytest.mark.parametrize("ratio", [0.2, 0.66, 1.0, 2.0])
def test_wait_free_backpropagation_has_backward_alone_to_hide_in(ratio: float) -> None:
    # The first gradient arrives after a layer's backward; the last all-reduce cannot begin before backward ends.
    first, last = 2 / 3 / LAYERS, ratio / LAYERS
    expected = 1 / 3 + max(2 / 3 + last, first + ratio)
    assert METHODS["wfbp"](even(), two(ratio)).step == pytest.approx(expected)


def test_early_updates_help_most_where_computation_and_wire_are_equal() -> None:
    assert METHODS["dear early"](even(), two(1.02)).step < 1.04 * 1.02
    assert METHODS["dear"](even(), two(1.02)).step > 1.15 * 1.02


def test_more_credit_delays_the_layer_that_is_needed_first() -> None:
    credits = (1, 2, 4, 8)
    steps = [by_priority(even(), two(1.0), partition=SIZE, credit=each * SIZE).step for each in credits]
    assert steps == sorted(steps)
    assert steps[-1] - steps[1] > 5 / LAYERS  # six more layers under way, each a layer's time on the wire


def test_a_start_costs_each_operation_once_and_merging_saves_it() -> None:
    alpha = 0.01
    single, merged = (METHODS[name](even(0.1), two(0.1, alpha)).step for name in ("wfbp", "ddp"))
    assert single == pytest.approx(2 * alpha * LAYERS, rel=0.2)  # an all-reduce of two ranks has two turns
    assert merged == pytest.approx(0.1 / 3 + 2 * alpha * 11 + 0.1, rel=0.01)  # forward, eleven buckets, the bytes


def test_lanes_wait_side_by_side_and_share_what_moves_bytes() -> None:
    def both(cost: Cost) -> float:
        wire = Wire()
        operations = [wire.send(lane, Operation(lane, cost)) for lane in ("reductions", "gathers")]
        now = 0.0
        while not all(operation.done for operation in operations):
            now += wire.advance(float("inf"))
        return now

    assert both(Cost(1.0, 0.0)) == pytest.approx(1.0)
    assert both(Cost(0.0, 1.0)) == pytest.approx(2.0)
    assert both(Cost(1.0, 1.0)) == pytest.approx(3.0)


def test_operations_of_a_lane_follow_one_another() -> None:
    wire = Wire()
    for label in ("first", "second"):
        wire.send("reductions", Operation(label, Cost(0.5, 1.0)))
    while wire.busy:
        wire.advance(float("inf"))
    assert [(one.label, one.begun, one.ended) for one in wire.spans] == [("first", 0.0, 1.5), ("second", 1.5, 3.0)]


@pytest.mark.parametrize(
    ("most", "seconds"),
    [
        ((1.0,), [1.0]),
        ((0.5,), [2.0]),  # alone, and cannot use more
        ((0.5, 0.5), [2.0, 2.0]),  # side by side, and not in each other's way
        ((1.0, 0.25), [4 / 3, 4.0]),  # one has what the other leaves
        ((1.0, 1.0, 0.5), [3.0, 3.0, 3.0]),
    ],
)
def test_an_operation_that_cannot_fill_the_wire_leaves_the_rest_to_others(
    most: tuple[float, ...], seconds: list[float]
) -> None:
    wire, now = Wire(), 0.0
    ended: dict[int, float] = {}
    for lane, share in enumerate(most):
        wire.send(str(lane), Operation("", Cost(0.0, 1.0), lambda lane=lane: ended.setdefault(lane, now), share))  # type: ignore[misc]
    while wire.busy:
        before, step = now, 1e-3  # looked at so often
        now = before + wire.advance(step)
    assert [ended[lane] for lane in range(len(most))] == pytest.approx(seconds, abs=5e-3)


def _of_owners(owners: list[int], ranks: int, compute: float, wire: float) -> Run:
    work = even(compute)
    buckets = fused(work.layers, 3 * SIZE)
    network = Network(ranks, Link(0.0, wire / (LAYERS * SIZE)))
    return decoupled(work, network, owned(work.layers, buckets, owners, ranks), lanes=2)


def test_owners_of_whole_parameters_send_what_they_own() -> None:
    work = Workload((Layer("a", 0, 0, (3, 1)), Layer("b", 0, 0, (5,)), Layer("c", 0, 0, (7,))))
    buckets = fused(work.layers, 9)
    assert [one.shares for one in owned(work.layers, buckets, [0, 1, 1, 0], 2)] == [(3, 6), (7, 0)]
    assert filled([2, 2, 2, 2]) == pytest.approx(1.0)
    assert filled([8, 0, 0, 0]) == pytest.approx(3 / 4)  # links carry all of it, and not three quarters
    assert filled([8]) == 1.0


def test_unequal_shards_in_turn_fill_both_directions_and_those_of_one_owner_do_not() -> None:
    bytes_alone = 0.0
    equal = decoupled(even(bytes_alone), two(1.0), fused(even().layers, 3 * SIZE)).step
    in_turn = _of_owners([place % 2 for place in range(LAYERS)], 2, bytes_alone, 1.0).step
    one = _of_owners([0] * LAYERS, 2, bytes_alone, 1.0).step
    assert equal == pytest.approx(1.0)
    assert in_turn == pytest.approx(1.0, rel=0.07)  # the first bucket and the last one are alone in theirs
    assert one == pytest.approx(2.0)
    assert _of_owners([place % 2 for place in range(LAYERS)], 2, 1.0, 0.0).step == pytest.approx(1.0)


def test_the_rank_that_owns_most_updates_last() -> None:
    layers = (Layer("a", 0.0, 0.0, (600,)), Layer("b", 0.0, 0.0, (400,)))
    buckets = owned(layers, fused(layers, 1000), [0, 1], 2)
    found = decoupled(Workload(layers, Costs(update=1e-3)), Network(2, Link(0.0, 0.0)), buckets)
    assert found.step == pytest.approx(0.6)


@pytest.mark.parametrize(("credit", "seconds"), [(2, 1.0 + (1.0 + 2.0) + 2.0), (1, 1.0 + 2 * (1.0 + 2.0))])
def test_ranks_wait_to_be_told_what_is_next_where_nothing_else_is_under_way(credit: int, seconds: float) -> None:
    """Backward takes a second, a message one, an all-reduce of two ranks two; there are two partitions."""
    work = Workload((Layer("a", 0.0, 1.0, (2,)),))
    assert by_priority(work, Network(2, Link(1.0, 0.0)), partition=1, credit=credit).step == pytest.approx(seconds)


def test_horovod_waits_for_half_a_cycle_and_negotiates_before_it_reduces() -> None:
    work = Workload((Layer("a", 0.0, 1.0, (1,)),))
    found = negotiated(work, Network(2, Link(1.0, 0.0)), threshold=1, cycle=0.5)
    assert found.step == pytest.approx(1.0 + 0.25 + 2.0 + 2.0)


def test_copies_into_the_fusion_buffer_hold_up_the_wire() -> None:
    work, network, cycle = even(0.1), two(1.0), 1e-6

    def step(copy: float, threshold: float) -> float:
        return negotiated(work, network, threshold=threshold, cycle=cycle, copy=copy).step

    second = 1 / (LAYERS * SIZE)  # of each byte, so that all of them take one
    assert step(second, 6 * SIZE) - step(0.0, 6 * SIZE) == pytest.approx(2.0, rel=0.1)  # in, and out
    assert step(second, SIZE) == pytest.approx(step(0.0, SIZE))  # alone, a gradient is reduced where it is


@pytest.mark.parametrize("model", ["resnet50@rtx2080ti:64", "densenet201@rtx2080ti:32", "bert@rtx2080ti:32"])
def test_buckets_of_ddp_are_those_that_torch_makes(model: str) -> None:
    name, _, rest = model.partition("@")
    device, _, batch_size = rest.partition(":")
    layers, mb = load(name, device, int(batch_size)).layers, 2**20
    sizes = [bucket.nbytes for bucket in per_tensor(layers)]
    tensors = [torch.empty(nbytes // 4, device="meta") for nbytes in sizes]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * mb]
    made, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    ours = [(bucket.tensors, bucket.nbytes) for bucket in in_one_order(layers, 25 * mb, mb)]
    assert ours == [(len(bucket), sum(sizes[index] for index in bucket)) for bucket in made]


def test_two_layers_one_by_one() -> None:
    layers = (Layer("a", 0.0, 0.0, (1,)), Layer("b", 0.0, 1.0, (1,)))
    found = decoupled(Workload(layers), Network(2, Link(1.0, 0.0)), fused(layers, 0))
    assert found.step == pytest.approx(5.0)  # b's backward, its reduction and a's, a's gathering and b's
    assert found.waits == pytest.approx({"reduce-scatter 0": 2.0, "all-gather 0": 1.0, "all-gather 1": 1.0})


def test_what_is_kept_for_a_picture_is_the_last_two_steps() -> None:
    found = METHODS["dear"](even(), two(1.0))
    computed = [span for span in found.spans if span.row == "thread"]
    assert min(span.begun for span in computed) == pytest.approx(0.0, abs=1e-9)
    assert max(span.ended for span in computed) == pytest.approx(2 * found.step)


@dataclass(frozen=True)
class Handled:
    """A network whose bytes take processor seconds of each rank."""

    under: Network
    per_byte: float

    @property
    def workers(self) -> int:
        return self.under.workers

    def reduce_scatter(self, nbytes: float) -> Cost:
        return replace(self.under.half(nbytes), processor=self.per_byte * nbytes)

    all_gather = reduce_scatter

    def all_reduce(self, nbytes: float) -> Cost:
        return self.reduce_scatter(nbytes) + self.reduce_scatter(nbytes)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "bytescheduler"])
def test_computation_lasts_longer_by_what_moving_bytes_takes_of_its_cores(method: str) -> None:
    handling = 0.1  # processor seconds of each rank in a step; a tenth of them passes where nothing is computed
    network = Handled(two(0.5), handling / (2 * LAYERS * SIZE))
    free, short, ample = (
        METHODS[method](even(cores=cores), network).step  # type: ignore[arg-type]
        for cores in (None, Cores(2, 2), Cores(4, 2))
    )
    assert ample == pytest.approx(free)  # idle cores move the bytes
    hidden = 0.5 - (free - 1.0)  # seconds of the wire under computation
    assert short - free == pytest.approx(handling * hidden / 0.5, rel=0.15)


def test_operations_that_share_the_wire_take_no_more_of_the_cores() -> None:
    wire = Wire()
    wire.send("a", Operation("a", Cost(0.0, 1.0, processor=0.3)))
    assert wire.cores == pytest.approx(0.3)
    wire.send("b", Operation("b", Cost(1.0, 1.0, processor=0.4)))
    assert wire.cores == pytest.approx(0.3 + 0.2)
    wire.advance(1.0)
    assert wire.cores == pytest.approx(0.2)


def test_a_ring_through_hosts() -> None:
    fast, slow = Link(1.0, 1e-3), Link(10.0, 1e-2)
    ring = Network(8, slow, per_host=4, within=fast).half(8000)
    assert (ring.latency, ring.transfer) == pytest.approx((2 * 10.0 + 5 * 1.0, 7 / 8 * 80))
    fast_start = Network(8, Link(0.5, 1e-2), per_host=4, within=fast).half(8000)
    assert fast_start.latency == pytest.approx(6 * 1.0 + 1 * 0.5)  # all links of the circle but one, a cheapest
    assert Network(4, slow, per_host=4, within=fast).half(8000).seconds == pytest.approx(3 * 1.0 + 3 / 4 * 8)
    assert Network(1, slow).all_reduce(8000).seconds == 0.0
    with pytest.raises(ValueError, match="7 workers do not fill hosts of 4"):
        Network(7, slow, per_host=4)


def test_buckets_of_each_kind() -> None:
    layers = [Layer(str(number), 0, 0, (3, 1)) for number in range(3)]
    assert [(b.first, b.last, b.nbytes, b.tensors) for b in fused(layers, 8)] == [(0, 1, 8, 4), (2, 2, 4, 2)]
    assert [(b.first, b.nbytes) for b in per_tensor(layers)] == [(2, 1), (2, 3), (1, 1), (1, 3), (0, 1), (0, 3)]
    ordered = in_one_order(layers, 5, 1)
    assert [(b.first, b.last, b.nbytes, b.tensors) for b in ordered] == [(2, 2, 1, 1), (1, 2, 7, 3), (0, 0, 4, 2)]


def test_a_large_job_is_simulated_in_seconds() -> None:
    layers = tuple(Layer(str(number), 1e-4, 2e-4, (2_000_000, 2_000)) for number in range(400))
    work = Workload(layers, Costs(1e-6, 1e-5, 1e-11))
    network = Network(4096, Link.of_gbit(100, 1e-6), per_host=8, within=Link.of_gbit(2400, 1e-6))
    begun = time.process_time()
    for early in (False, True):
        decoupled(work, network, fused(layers, 0), early=early)
    all_reduced(work, network, per_tensor(layers))
    by_priority(work, network, partition=2**20, credit=2**21)
    negotiated(work, network, threshold=2**27, cycle=1e-3)
    assert time.process_time() - begun < 10
