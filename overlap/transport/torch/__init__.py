"""Collectives over torch.distributed's messages, for jobs that torchrun starts."""
