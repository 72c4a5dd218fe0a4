"""What emitted code calls: collectives with autograd, loss, random masks, and the simulation of ranks."""
