"""Which stream waits for which, as the calls show it."""

from __future__ import annotations

import numpy as np

from tests.gpu_double import Double, eventually


def test_an_operation_is_ordered_by_events_alone(gpu: Double) -> None:
    (comm,) = gpu.world(1)
    producer, consumer = gpu.stream(), gpu.stream()
    gradients, shard = np.ones(4, np.float32), np.zeros(4, np.float32)
    work = comm.reduce_scatter_async(
        gpu.memory(gradients, 0, producer), gpu.memory(shard, 0, producer), label="bucket 3"
    )
    log = gpu.log()
    ours = log[1].split()[1]
    before, after = gpu.name(producer), gpu.name(consumer)
    assert log == [
        f"record e1 {before}",
        f"wait {ours} e1",
        f"reduce_scatter {log[2].split()[1]} {ours} count=4 type=7 op=0 root=0",
        f"record e2 {ours}",
    ]
    work.order_before(consumer)
    assert [line.split()[:2] for line in gpu.log()] == [["wait", after]]
    assert not work.done(), "nothing waited for the device"
    assert "'bucket 3' (4 x float32, rank 0 of 1 on nccl-world): unfinished" in work.describe()
    assert gpu.run() == 0
    eventually(work.done)
    work.wait()
    gpu.log()
    work.order_before(consumer)
    assert gpu.log() == [], "what is done needs no event"


def test_buffers_of_two_streams_are_both_followed(gpu: Double) -> None:
    (comm,) = gpu.world(1)
    one, other = gpu.stream(), gpu.stream()
    a, b = np.ones(4, np.float32), np.zeros(4, np.float32)
    comm.all_reduce_async(gpu.memory(a, 0, one), gpu.memory(b, 0, other))
    assert [line.split()[-1] for line in gpu.log() if line.startswith("record")][:2] == [gpu.name(one), gpu.name(other)]
    comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(b, 0))
    assert gpu.log()[0].endswith(" s0"), "without a stream it is the legacy default stream"


def test_streams_are_of_the_highest_priority_and_apart(gpu: Double) -> None:
    comms = gpu.world(2)
    parts = gpu.split(comms, [0, 0])
    made = [line for line in gpu.log() if line.startswith("create")]
    assert len({line.split()[1] for line in made}) == 2
    assert all(line.endswith("flags=1 priority=-5") for line in made)
    gradients, shard, parameters = np.ones(4, np.float32), np.zeros(2, np.float32), np.ones(4, np.float32)
    lonely = comms[0].reduce_scatter_async(gpu.memory(gradients, 0), gpu.memory(shard, 0))
    gathers = [
        part.all_gather_async(gpu.memory(parameters[2 * r : 2 * r + 2], r), gpu.memory(parameters, r))
        for r, part in enumerate(parts)
        if part is not None
    ]
    gpu.run()
    for work in gathers:
        eventually(work.done)  # an all-gather waits behind no reduce-scatter
    assert not lonely.done()
    comms[1].reduce_scatter_async(gpu.memory(np.ones(4, np.float32), 1), gpu.memory(np.zeros(2, np.float32), 1))
    gpu.run()
    eventually(lonely.done)
