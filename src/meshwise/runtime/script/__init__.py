"""Anybody's torch program as one rank of a large job, without GPUs: `meshwise dryrun -- python train.py`.

The program runs unmodified, in a process of its own. A hook on the module path waits until it imports torch
and then makes torch believe in CUDA devices and NCCL (`child.py`): tensors on `cuda` are fake, with shapes
and no memory; process groups of any size move nothing; everything else is torch itself. Small tensors of the
CPU are real, so that samplers, seeds and token ids have their values.

Private API of torch 2.13 is used throughout.
"""
