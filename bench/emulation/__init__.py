"""An emulated accelerator, with real parameters and gradients, whose computation is slept through."""
