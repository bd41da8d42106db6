"""Mutations of what happens on a GPU: streams, copies through the host, graphs, times of the device."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_ISSUING = "tests/overlap/transport/test_issuing.py"
_CARRIERS = "mpi-2 tests/spmd/test_device_carriers.py"

MUTATIONS = [
    Mutation(
        "what has no copy to wait for is not issued before what has",
        "overlap/transport/cuda/issuing.py",
        "if not self._queue and (copied is None or copied.done()):",
        "if copied is None or copied.done():",
        _ISSUING,
    ),
    Mutation(
        "after an operation that could not be issued none is",
        "overlap/transport/cuda/issuing.py",
        "        for entry in self._queue:\n            entry.work.resolve(failure)\n        self._queue.clear()\n",
        "        self._queue.popleft().work.resolve(failure)\n",
        _ISSUING,
    ),
    Mutation(
        "whoever ends a session knows of what is not issued yet",
        "overlap/transport/cuda/issuing.py",
        "self._host.promised = self._host.committed + 1",
        "self._host.promised = self._host.issued",
        _ISSUING,
    ),
    Mutation(
        "who waits for a device does not look as one that waits for other ranks",
        "overlap/transport/cuda/issuing.py",
        "if limit is None and copied is not None:",
        "if limit is None and copied is None:",
        _ISSUING,
    ),
    Mutation(
        "memory of an operation that is over is let go",
        "overlap/transport/cuda/issuing.py",
        "            del first  # with its memory, while this thread waits for the next\n",
        "",
        _ISSUING,
    ),
    Mutation(
        "operations on the host's tensors wait for those of the device's",
        "overlap/transport/cuda/communicator.py",
        "            def issue() -> Work:\n                self._carrier.flush()\n",
        "            def issue() -> Work:\n",
        f"{_CARRIERS} -k tensors_follow",
    ),
    Mutation(
        "a reduction follows all streams that wrote gradients",
        "overlap/core/round.py",
        "if self._streams is not None and len(self._written_on) > 1:",
        "if self._streams is not None and len(self._written_on) > 2:",
        f"{_CARRIERS} -k all_streams",
    ),
    Mutation(
        "streams of a round are forgotten with it",
        "overlap/core/round.py",
        "        self._written_on.clear()\n",
        "",
        f"{_CARRIERS} -k all_streams",
    ),
    Mutation(
        "a graph around the modules of the parameters is found",
        "overlap/core/cuda_graphs.py",
        "for one in holders(parameters))",
        "for one in ())",
        f"{_CARRIERS} -k graphs_of",
    ),
    Mutation(
        "a capture of a gate is refused",
        "overlap/core/engine.py",
        "if self._capturing is not None and self._capturing():",
        "if self._capturing is not None and self._capturing is None:",
        f"{_CARRIERS} -k graphs_of",
    ),
    Mutation(
        "parameters that stay where they are may be in graphs",
        "overlap/optimizer/assembly.py",
        "    gated = updates is not Updates.WHOLE\n",
        "    gated = True\n",
        f"{_CARRIERS} -k graphs_of",
    ),
    Mutation(
        "scalars of a device travel on the host",
        "overlap/state/reshard.py",
        'if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value',
        "if False else value",
        "tests/overlap/state/test_reshard.py",
    ),
    Mutation(
        "of a device, too, what a script writes to a rounded parameter counts",
        "overlap/features/rounded_parameters.py",
        "torch.where(self.packed == self._seen, self.values, self._seen, out=self.values)",
        "pass",
        "tests/overlap/features/test_rounded_parameters.py",
    ),
    Mutation(
        "the host does not look at rounded parameters of a device",
        "overlap/features/rounded_parameters.py",
        "if streams.on_device(self._seen):",
        "if self._seen.is_cuda:",
        f"{_CARRIERS} -k host_waits",
    ),
    Mutation(
        "on a GPU there are fewer buckets until there is a plan",
        "overlap/plan/fusion.py",
        '_AUTO_BUCKETS.get(device, _AUTO_BUCKETS["cuda"])',
        '_AUTO_BUCKETS["cpu"]',
        "tests/dear/test_schedule.py",
    ),
    Mutation(
        "mgwfbp goes by when a device has computed gradients",
        "mgwfbp/backward_times.py",
        "            self._lap[index] = self._stamps.now()\n",
        "            self._lap[index] = [0.0]\n",
        "tests/mgwfbp/test_backward_times.py",
    ),
    Mutation(
        "mgwfbp goes by the cost of what moves gradients",
        "mgwfbp/optimizer.py",
        "strategy.cost = link_cost(mine if launched else session.comm)",
        "link_cost(mine if launched else session.comm)",
        "mpi-2 tests/spmd/test_mgwfbp.py -k cost_is_measured",
    ),
]
