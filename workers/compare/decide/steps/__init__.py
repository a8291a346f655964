"""Judges every recorded step by itself, with torch's optimizer in one process as the reference.

Law: a step begins from recorded parameters, so rounding of earlier steps does not count. What it must do
follows from the gradients that autograd made on each rank. The difference is measured against the update, not
against the weight, so small learning rates are judged as strictly as large ones.
"""
