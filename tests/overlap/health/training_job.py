"""A small job of two ranks that trains, to which tests add what goes wrong."""

from __future__ import annotations

__all__ = ["IMPORTS", "LAUNCHERS", "TRAINING"]

LAUNCHERS = ["mpi", "torchrun"]
IMPORTS = """
import ctypes, logging, os, signal, sys, time
from pathlib import Path
import torch
logging.basicConfig(level=logging.INFO)
def stand_still():  # as a process that is stopped: no thread of Python's goes on
    print("stands still", flush=True)
    ctypes.PyDLL(None).sleep(1000)
"""
TRAINING = """
import dear
dear.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()  # some tests train for seconds: it must not diverge
        optimizer.step()
train(3)
"""
