"""Layers whose weights are divided among the ranks of the tensor axis (Megatron-LM, 3; fairscale.nn.model_parallel).

ColumnParallelLinear   Y = X [A1 A2]              each rank has some of the outputs
RowParallelLinear      Y = X1 A1 + X2 A2          each rank has some of the inputs, and outputs are summed
ParallelEmbedding      each rank has some of the columns      VocabParallelEmbedding    … some of the rows

A column layer that does not gather, followed by a row layer whose input is parallel, is one sum forward and one backward.
Weights are drawn whole on every rank, the first rank's are taken, and each keeps its part: values are those of the layer
that is not divided. Lengths that the number of ranks does not divide are divided as evenly as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model_parallel.initialize import tensor_axis
from model_parallel.mappings import (
    gather_from_model_parallel_region,
    own_part,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
    sizes,
    start_sum,
)
from overlap.job.axes import Axis, Part, set_part
from overlap.transport.operation import broadcast
from overlap.transport.work import arrive

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

Init = Callable[[torch.Tensor], Any]


class _Linear(torch.autograd.Function):
    """A product whose input's gradient is summed over the ranks while the weight's is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_x, work = start_sum(gradient.matmul(weight), ctx.axis) if wants_x else (None, None)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if wants_weight else None
        of_bias = rows.sum(0) if wants_bias else None
        if work is not None:
            arrive(work)
        return of_x, of_weight, of_bias, None


def _whole(axis: Axis, shape: Sequence[int], init: Init, like: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that is not divided, the same on every rank, which all call this."""
    whole = torch.empty(*shape, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        init(whole)
        if axis.size > 1 and not whole.is_meta:
            arrive(axis.on(whole).start(broadcast(whole, 0, label=f"{axis.name} axis")))
    return whole


class _Divided(torch.nn.Module):
    """What the layers share: a weight that is divided along `_dim`, and perhaps has the whole one beside it."""

    _dim: int
    weight: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.axis = tensor_axis()
        self.master_weight: torch.Tensor | None = None

    def _take(self, name: str, whole: torch.Tensor, dim: int, stride: int = 1) -> None:
        """Make the parameter `name`: this rank's part of `whole`. With a `stride`, of each of so many blocks."""
        lengths = sizes(whole.shape[dim] // stride, self.axis.size)
        blocks = whole.detach().chunk(stride, dim)
        part = torch.cat([own_part(block, self.axis, lengths, dim) for block in blocks], dim)
        parameter = torch.nn.Parameter(part)
        self.register_parameter(name, parameter)
        if self.axis.size > 1:
            set_part(parameter, Part(self.axis, dim, tuple(stride * length for length in lengths), stride))

    def _init(self, shape: Sequence[int], init: Init, stride: int, keep: bool) -> None:
        whole = _whole(self.axis, shape, init, torch.empty(0))
        if stride < 1 or whole.shape[self._dim] % stride:
            raise ValueError(
                f"stride={stride} does not divide the {whole.shape[self._dim]} that are divided among ranks"
            )
        self._take("weight", whole, self._dim, stride)
        self.master_weight = whole if keep else None


def _cast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """As autocast would, for a function that computes its own gradients."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


class ColumnParallelLinear(_Divided):
    """``nn.Linear`` whose outputs are divided among the ranks of the tensor axis; made and called by all of them.

    Args:
        in_features: of the whole layer, as `out_features`. `weight` is (own outputs, in_features), `bias` (own outputs).
        bias: whether there is one; it begins as zeros.
        gather_output: True returns all outputs on every rank, (…, out_features); False this rank's.
        init_method: fills the whole weight, in place.
        stride: so many blocks of outputs, such as 3 of query, key and value, are each divided for themselves.
        keep_master_weight_for_test: the whole weight, as it was made, is `master_weight`.

    The input, (…, in_features), is the same on every rank. Its gradient is summed while the weight's is computed.
    """

    _dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Init = torch.nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        if gather_output and stride != 1:
            raise ValueError(f"stride={stride} with gather_output=True would mix the blocks: give gather_output=False")
        self._init((out_features, in_features), init_method, stride, keep_master_weight_for_test)
        self.bias: torch.nn.Parameter | None
        if bias:
            self._take("bias", torch.zeros(out_features), 0, stride)
        else:
            self.register_parameter("bias", None)

    @property
    def output_size_per_partition(self) -> int:
        """The number of this rank's outputs."""
        return self.weight.shape[0]

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return F.linear(input_, self.weight, self.bias)
        x, weight, bias = _cast(input_, self.weight, self.bias)
        output: torch.Tensor = _Linear.apply(x, weight, bias, self.axis)
        if not self.gather_output:
            return output
        return gather_from_model_parallel_region(output, self.axis, sizes(self.out_features, self.axis.size))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, of which {self.weight.shape[0]} are here"


class RowParallelLinear(_Divided):
    """``nn.Linear`` whose inputs are divided among the ranks of the tensor axis; made and called by all of them.

    Args:
        in_features: of the whole layer, as `out_features`. `weight` is (out_features, own inputs); `bias`,
            (out_features), is the same on every rank, and added once.
        input_is_parallel: the input is this rank's part already, (…, own inputs), as a
            :class:`ColumnParallelLinear` without `gather_output` returns it; False: all inputs, of which the part is taken.
        stride: so many blocks of inputs are each divided for themselves.

    Others as for :class:`ColumnParallelLinear`. The output, (…, out_features), is the same on every rank.
    """

    _dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Init = torch.nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.input_is_parallel = in_features, out_features, input_is_parallel
        if stride != 1 and not input_is_parallel:
            raise ValueError(f"stride={stride} needs an input in such parts: give input_is_parallel=True")
        self._init((out_features, in_features), init_method, stride, keep_master_weight_for_test)
        self.bias = torch.nn.Parameter(torch.zeros(out_features)) if bias else None

    @property
    def input_size_per_partition(self) -> int:
        """The number of this rank's inputs."""
        return self.weight.shape[1]

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return F.linear(input_, self.weight, self.bias)
        part = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_, self.axis)
        output = reduce_from_model_parallel_region(F.linear(part, self.weight), self.axis)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, of which {self.weight.shape[1]} are here, out_features={self.out_features}"


class _Embedding(_Divided):
    """What the two embeddings share: torch's arguments, and how the table is filled."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Init = torch.nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is none of the {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse

        def fill(table: torch.Tensor) -> None:
            init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx].zero_()  # as nn.Embedding has it

        self._init((num_embeddings, embedding_dim), fill, 1, keep_master_weight_for_test)

    def _look_up(self, indices: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        return F.embedding(
            indices, self.weight, padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def extra_repr(self) -> str:
        shape = ", ".join(map(str, self.weight.shape))
        return f"{self.num_embeddings}, {self.embedding_dim}, of which ({shape}) are here"


class ParallelEmbedding(_Embedding):
    """``nn.Embedding`` whose columns are divided among the ranks of the tensor axis; made and called by all of them.

    Arguments are those of ``nn.Embedding``, with `init_method` and `keep_master_weight_for_test` as above. `max_norm`
    raises ``NotImplementedError``: no rank has a whole row. Returns (…, embedding_dim) on every rank.
    """

    _dim = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.max_norm is not None and self.axis.size > 1:
            raise NotImplementedError(
                f"max_norm={self.max_norm}: no rank has a whole row of a ParallelEmbedding; VocabParallelEmbedding has"
            )

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        part = self._look_up(input_, self.padding_idx)
        return gather_from_model_parallel_region(part, self.axis, sizes(self.embedding_dim, self.axis.size))


class VocabParallelEmbedding(_Embedding):
    """``nn.Embedding`` whose rows are divided among the ranks of the tensor axis; made and called by all of them.

    Arguments are those of ``nn.Embedding``, with `init_method` and `keep_master_weight_for_test` as above.
    Returns (…, embedding_dim) on every rank. Raises ``IndexError`` on every rank for an index that is no row.
    """

    _dim = 0

    @property
    def first_row(self) -> int:
        """The first of the rows that this rank has."""
        return sum(sizes(self.num_embeddings, self.axis.size)[: self.axis.rank])

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return self._look_up(input_, self.padding_idx)
        if input_.numel():
            low, high = torch.aminmax(input_)
            if int(low) < 0 or int(high) >= self.num_embeddings:
                raise IndexError(
                    f"indices from {int(low)} to {int(high)} of an embedding of {self.num_embeddings} rows"
                )
        first, rows = self.first_row, self.weight.shape[0]
        here = (input_ >= first) & (input_ < first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        # Only rows that are looked up: max_norm and scale_grad_by_freq see no others.
        found = self._look_up(input_[here] - first, padding)
        output = found.new_zeros(*input_.shape, self.embedding_dim).index_put((here,), found)
        return reduce_from_model_parallel_region(output, self.axis)


def divided(kind: type[_Divided], layer: torch.nn.Module, **options: Any) -> _Divided:
    """A layer of this `kind` with the values, types and training flags of the whole `layer`, of torch. On every rank.

    For the linear ones `layer` is an ``nn.Linear``, for embeddings an ``nn.Embedding``.
    """
    weight: torch.nn.Parameter = layer.weight  # type: ignore[assignment]
    made = kind.__new__(kind)
    _Divided.__init__(made)
    for name, value in options.items():
        setattr(made, name, value)
    whole = _whole(made.axis, weight.shape, lambda table: table.copy_(weight), weight)
    made._take("weight", whole, kind._dim)
    made.weight.requires_grad_(weight.requires_grad)
    if isinstance(layer, torch.nn.Linear):
        bias = layer.bias
        if bias is None:
            made.register_parameter("bias", None)
        else:
            whole = _whole(made.axis, bias.shape, lambda values: values.copy_(bias), bias)
            if kind._dim == 0:
                made._take("bias", whole, 0)
            else:
                made.register_parameter("bias", torch.nn.Parameter(whole))
            made.get_parameter("bias").requires_grad_(bias.requires_grad)
    made.train(layer.training)
    return made
