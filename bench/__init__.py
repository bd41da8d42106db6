"""Benchmarks, and the emulated cluster they run on.

What lies in bench/ itself, but for `program`, is a command of one file, and nothing imports it. The rest are rooms, which
import those before them and none behind:

    program < models < emulation < methods < train < steps < sweep < collectives
            < accuracy < paired < pipeline < integrations < validation < claims < gpu

program      what all commands share
models       what is trained, and the batches it is fed with
emulation    hosts and links (network namespaces) and accelerators (layers that sleep) that are not there
methods      the ways to train on several ranks: ours, and what people use today
train        one run: `python -m bench.train`, its settings, its launcher, and what a rank does
steps        every step of a run from the first on: `python -m bench.steps`
sweep        many runs, kept, judged and reported: `python benchmarks.py`
collectives  the communicators' operations beside gloo's: `python -m bench.collectives`
accuracy     the loss over wall time: `python -m bench.accuracy`
paired       two methods in the same processes, in turn: `python -m bench.paired`
pipeline     pipelines beside data parallelism, and torch's own: `python -m bench.pipeline`
integrations other libraries' trainers, their own DDP beside dear: `python -m bench.integrations`
validation   predictions held to measurement: `python -m bench.validation`; to papers: `python -m bench.validation.papers`
claims       what README.md and docs say of results: `python -m bench.claims`; again: `python -m bench.claims.repeat`
gpu          what a machine with one GPU has to show: `python -m bench.gpu`

In `baselines` lie the shell scripts of DDP, FSDP2 and Horovod; those of our strategies lie in their packages.
"""
