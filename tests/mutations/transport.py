"""Mutations of `overlap.transport`: what tensors and objects become on the wire and in files, and sums over gloo."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "whole numbers travel as they are under compression",
        "overlap/transport/compression.py",
        "if not tensor.dtype.is_floating_point or tensor.dtype is dtype:",
        "if tensor.dtype.is_complex or tensor.dtype is dtype:",
        "tests/overlap/transport/test_compression.py",
    ),
    Mutation(
        "what was compressed comes back in its type",
        "overlap/transport/compression.py",
        "    return tensor.to(dtype), tensor.dtype\n",
        "    return tensor.to(dtype), torch.float32\n",
        "tests/overlap/transport/test_compression.py",
    ),
    Mutation(
        "what is reduced is left as it was",
        "overlap/transport/reduction.py",
        "total = parts[0][part].to(wide, copy=True)",
        "total = parts[0][part].to(wide)",
        "tests/overlap/transport/test_reduction.py",
    ),
    Mutation(
        "16 bits are summed in fp32 and rounded once",
        "overlap/transport/reduction.py",
        "wide = torch.float32 if is_half(out.dtype) else out.dtype",
        "wide = out.dtype",
        "tests/overlap/transport/test_reduction.py",
    ),
    Mutation(
        "an average over a number of ranks that has no exact inverse is the sum divided by it",
        "overlap/transport/reduction.py",
        "total / size if size & (size - 1) else total * (1.0 / size)",
        "total * (1.0 / size)",
        "tests/overlap/transport/test_reduction.py",
    ),
    Mutation(
        "ranks that say more than others are told apart",
        "overlap/transport/objects.py",
        "for index in range(max(len(reference), len(signature))):",
        "for index in range(min(len(reference), len(signature))):",
        "tests/overlap/transport/test_objects.py",
    ),
    Mutation(
        "an object that fills its frame to the last byte comes as it went",
        "overlap/transport/objects.py",
        "return max(0, abs(_LENGTH.unpack_from(frame)[0]) + _LENGTH.size - _FRAME)",
        "return max(0, abs(_LENGTH.unpack_from(frame)[0]) - _FRAME)",
        "mpi-2 tests/spmd/test_communicator.py -k objects_of_every_length",
    ),
    Mutation(
        "what one rank cannot send fails on all",
        "overlap/transport/objects.py",
        "            length = -len(pickled)  # so the others can tell\n",
        "            length = len(pickled)\n",
        "mpi-2 tests/spmd/test_start.py -k cannot_send_fails",
    ),
    Mutation(
        "every file has the values of its moment",
        "overlap/transport/cut_pickles.py",
        "version = -1 if view.is_inference() else view._version",
        "version = -1 if view.is_inference() else 0",
        "tests/overlap/transport/test_cut_pickles.py",
    ),
    Mutation(
        "copies of views that no file needs are forgotten, and buffers that are gone",
        "overlap/transport/cut_pickles.py",
        "                del self[expired]\n",
        "                pass\n",
        "tests/overlap/transport/test_cut_pickles.py",
    ),
    Mutation(
        "a buffer more is no look at all buffers that are gone",
        "overlap/transport/cut_pickles.py",
        "            self._most = max(_FEW, 2 * len(self))\n",
        "",
        "tests/overlap/transport/test_cut_pickles.py",
    ),
    Mutation(
        "a view is saved with what a script has noted on it",
        "overlap/transport/cut_pickles.py",
        "    plain.__dict__.update(view.__dict__)\n",
        "",
        "tests/overlap/transport/test_cut_pickles.py",
    ),
    Mutation(
        "a default group's time limit is set without a deprecated function",
        "overlap/transport/torch/rendezvous.py",
        'getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout',
        'distributed_c10d._set_pg_timeout or getattr(dist, "set_timeout", None)',
        "tests/overlap/transport/test_rendezvous.py",
    ),
]
