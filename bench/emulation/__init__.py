"""An accelerator that only takes time: real parameters and gradients, computation slept through."""
