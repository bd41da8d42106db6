"""Every difference from ``horovod.torch`` that is meant, with its reason: what differs in docs/horovod.md, by name.

A difference shows in the calls that its sightings name, and only with answers that begin as they say. Calls where Horovod
crashes or hangs need no entry: the report names them.
"""

from __future__ import annotations

from tests.compare_horovod import numbers
from tests.compare_horovod.judgement import Difference, Sighting

__all__ = ["DIFFERENCES", "documented"]

_VALUE = r"(list\()*[a-z0-9]+\["  # a tensor, or a list of them
_MEANT = r"(ValueError|TypeError): "
_ACCIDENT = r"(HorovodInternalError|TypeError|AttributeError): "
_FIRST_LOSSES = r"loss 2\.30[78]\d loss 2\.29[78]\d loss 2\.29[45]\d loss 2\.26[56]\d "


def _refused(*subjects: str) -> tuple[Sighting, ...]:
    return tuple(Sighting(subject, _ACCIDENT, _MEANT) for subject in subjects)


def _absent(*names: str) -> tuple[Sighting, ...]:
    return tuple(Sighting(f"signatures/{name}", "", "absent") for name in names)


DIFFERENCES = (
    Difference(
        "types",
        "8- and 16-bit integers, bfloat16, bool and complex numbers travel too; what has no meaning (an average of "
        "booleans, the largest of complex numbers) raises",
        (
            Sighting("types/*", "ValueError: Tensor type .* is not supported", _VALUE),
            Sighting(
                "types/* of bool", "ValueError: Tensor type", "Unsupported: .* booleans can be neither averaged nor"
            ),
            Sighting("types/* of complex64", "ValueError: Tensor type", "Unsupported: .* is not defined for"),
        ),
    ),
    Difference(
        "layouts",
        "tensors need not be contiguous, in place too; Horovod refuses others",
        (
            Sighting("arguments/turned *", "ValueError: Tensor is required to be contiguous", _VALUE),
            Sighting("arguments/columns *", "ValueError: Tensor is required to be contiguous", _VALUE),
        ),
    ),
    Difference(
        "lists",
        "grouped forms always return lists, also of no tensors; Horovod's are lists or tuples, and no tensors raise",
        (
            Sighting("*grouped_*", r"tuple\(|'tuple'", r"list\(|'list'"),
            Sighting("arguments/grouped_* of nothing", "ValueError|IndexError", r"list\(\)"),
        ),
    ),
    Difference(
        "splits",
        "alltoall's splits are integers of any width and have to name every row; Horovod leaves out the rest in silence",
        (
            Sighting("arguments/splits of fewer rows", r"tuple\(", "ValueError: splits .* add up to"),
            Sighting("arguments/splits of 64 bits", "ValueError: alltoall expects .* 32-bit", r"tuple\("),
        ),
    ),
    Difference(
        "scalars",
        "allgather takes tensors without dimensions, as rows of one element",
        (Sighting("arguments/scalar allgather", "IndexError", "float32"),),
    ),
    Difference(
        "handles",
        "synchronize() of a handle that never was raises; Horovod returns None",
        (Sighting("arguments/synchronize(123456)", "None", "ValueError: handle 123456"),),
    ),
    Difference(
        "refusals",
        "arguments of the wrong kind are refused before anything is sent, as ValueError or TypeError with the value; "
        "Horovod raises what it runs into (TypeError of its bindings, AttributeError, HorovodInternalError)",
        _refused(
            "arguments/op=77",
            'arguments/op="sum"',
            "arguments/reducescatter op=77",
            "arguments/not a tensor",
            "arguments/a numpy array",
            "arguments/name=5",
            'arguments/compression="fp16"',
            "process sets/not registered",
            "process sets/removed, used",
            "process sets/process_set=None",
            "process sets/process_set=0",
            "state/the state of a number",
            "optimizer/groups=3.5",
        ),
    ),
    Difference(
        "sparse",
        "sparse_allreduce_async sums or averages; another op raises, where Horovod sums",
        (Sighting("arguments/sparse, Min", "sparse", "ValueError: sparse tensors can be summed or averaged"),),
    ),
    Difference(
        "objects",
        "objects are pickled with pickle, so lambdas and local classes raise",
        (Sighting("state/broadcast_object of a lambda", "", "(TypeError|Mismatch): .*cannot be pickled"),),
    ),
    Difference(
        "average",
        "average= is True or False, so that allreduce(t, hvd.Sum), which Horovod averages, raises",
        (Sighting("arguments/average=1", "float32", "ValueError: average should be True or False"),),
    ),
    Difference(
        "reducescatter",
        "reducescatter also takes Min, Max and Product, and op=None as allreduce does",
        (
            Sighting("arguments/reducescatter Min", "HorovodInternalError: Reducescatter currently only", "float32"),
            Sighting("arguments/reducescatter op=None", "TypeError", "float32"),
        ),
    ),
    Difference(
        "gradients",
        "Min, Max and Product refuse a backward pass; Horovod passes a gradient that is none",
        (Sighting("arguments/d allreduce Min", "float32", "NotImplementedError: .* gradient of MIN"),),
    ),
    Difference(
        "Adasum",
        "the name is there and raises where it is used: results would depend on the number of ranks",
        (
            Sighting("arguments/op=Adasum", "", "NotImplementedError: Adasum is not offered"),
            Sighting("optimizer/op=Adasum", "", "ValueError: op=Adasum is not supported"),
        ),
    ),
    Difference(
        "bf16",
        "Compression.bf16 beside Horovod's two",
        (Sighting("state/Compression", r"list\('fp16', 'none'\)", r"list\('bf16', 'fp16', 'none'\)"),),
    ),
    Difference(
        "fp16",
        "sums of 16-bit numbers are made in fp32 and rounded once; Horovod rounds after each addition, so that of more "
        "than two ranks the last places differ, and a script's losses drift apart",
        (
            *numbers.FP16,
            Sighting("scripts/MNIST, fp16 on the wire*", _FIRST_LOSSES, _FIRST_LOSSES, ranks=(4,)),
        ),
    ),
    Difference(
        "class",
        "the wrapper holds the optimizer instead of deriving from its class: it is a torch.optim.Optimizer, and no SGD",
        (Sighting("optimizer/classes", r"list\(True, True\)", r"list\(True, False\)"),),
    ),
    Difference(
        "op",
        "an optimizer's op is Average or Sum: the smallest of the ranks' gradients is no gradient",
        (Sighting("optimizer/op=Min", r"list\(", "ValueError: op should be Average or Sum"),),
    ),
    Difference(
        "zero_grad",
        "zero_grad() before step() drops the gradients, and a further backward adds to them, where Horovod's assertions "
        "forbid both",
        numbers.DROPPED,
    ),
    Difference(
        "closure",
        "step(closure) averages the gradients that the closure computes; Horovod's ranks step by their own",
        numbers.CLOSURE,
    ),
    Difference(
        "warning",
        "step() after synchronize() knows that the gradients are averages, and does not warn that it averages again",
        numbers.WARNED,
    ),
    Difference(
        "unused",
        "a parameter that no rank used in a step is left alone; Horovod steps with a zero gradient, weight decay included",
        numbers.UNUSED,
    ),
    Difference(
        "alone",
        "with one rank gradients are treated as with several: compressed, and arguments checked; Horovod's wrapper then "
        "does neither",
        (
            *numbers.ALONE,
            Sighting("optimizer/groups=3.5", r"list\(float32", "ValueError: groups should be", ranks=(1,)),
        ),
    ),
    Difference(
        "SyncBatchNorm",
        "takes tensors on the CPU too",
        (
            Sighting(
                "optimizer/SyncBatchNorm", "ValueError: SyncBatchNorm expected input tensor to be on GPU", r"list\("
            ),
        ),
    ),
    Difference(
        "elastic",
        "a job restarts from a commit, with as many ranks as there are then; names for a rendezvous that goes on without "
        "the lost hosts are not there",
        _absent("elastic.init", "elastic.shutdown", "elastic.run_fn", "elastic.TorchState.on_hosts_updated"),
    ),
    Difference(
        "parameters",
        "broadcast_parameters also takes generators, as named_parameters() is one",
        (
            Sighting("state/named parameters", "ValueError: invalid params", r"list\("),
            Sighting("state/a generator of parameters", "ValueError: invalid params", r"list\("),
        ),
    ),
    Difference(
        "optimizer-state",
        "broadcast_optimizer_state follows the root: no step is taken to create state (Horovod's leaves zeros in .grad), "
        "hyper-parameters come where there is no state, and LBFGS's state comes too",
        (
            Sighting("state/SGD's state, before any step", r"tuple\(", r"tuple\(list\({'lr': 0.1, .*, {}\)"),
            Sighting("state/state that rank 0 alone lacks", r"tuple\(.* \[0.0, 0.0\]", r"tuple\(.*, {}\)"),
            Sighting("state/Adam's state, before any step", r"tuple\(.*'step'", r"tuple\(.*, {}\)"),
            Sighting("state/LBFGS's state", "ValueError: cannot broadcast torch.optim.LBFGS state", "None"),
        ),
    ),
    Difference(
        "join",
        "Min, Max and Product are over the ranks that still contribute (Horovod takes the others for zeros); a device that "
        "cannot be raises",
        (
            *numbers.JOIN,
            Sighting("join/join(-2)", "True", "ValueError: device should be a GPU's number or -1 and is -2"),
        ),
    ),
    Difference(
        "sets",
        "process sets are made of ranks, not of communicators; sets without ranks, with one twice or from outside the job "
        "raise; what a set knows is None unless it is registered",
        (
            Sighting("process sets/as text", "'ProcessSet.*mpi_comm=None", "'ProcessSet"),
            Sighting("process sets/not registered, included", "True|False", "None"),
            Sighting("process sets/removed, included", r"list\(.*(True|False)\)$", r"list\(.*None\)$"),
            Sighting("process sets/a rank twice", r"list\(0, 0\)", "ValueError: a ProcessSet names each rank once"),
            Sighting("process sets/no ranks", "False", "Mismatch: .* it has no ranks"),
            Sighting("after shutdown/rank in the global process set", "ValueError: Horovod has not been init", "None"),
        ),
    ),
    Difference(
        "built",
        "they say what is true here: MPI is enabled where it has brought the ranks together, gloo stands for TCP without "
        "MPI, and nothing is enabled after shutdown()",
        (
            Sighting("state/gloo_built", "False", "True"),
            Sighting("after shutdown/mpi_enabled", "True", "False"),
        ),
    ),
    Difference(
        "init",
        "init() returns the session; Horovod's returns None",
        (Sighting("state/init again", "None", "<overlap.job.session.Session object"),),
    ),
    Difference(
        "is_homogeneous",
        "is there: Horovod documents it, and its module for torch lacks it",
        (Sighting("state/is_homogeneous", "AttributeError: module 'horovod.torch'", "True"),),
    ),
    Difference(
        "modules",
        "submodules and check_extension are not there; take their names from hvd itself",
        _absent("check_extension", "functions", "mpi_lib_v2", "mpi_ops", "sync_batch_norm"),
    ),
)


def documented() -> str:
    """The table of `docs/horovod.md`."""
    lines = ["| name | what differs |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{each.name}` | {each.reason} |" for each in DIFFERENCES)])
