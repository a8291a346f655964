"""Records what every step of a comparison did, on a few elements of each parameter, for the gate to judge.

A sampled element is recorded where it leaves the script and where it comes back, never inside the exchange
that is judged: this rank's own gradient from autograd, the gradient when backward has returned, the gradient
that `step()` gets, and the parameters before and after the step.
"""
