"""Registers the installation of kernels that share memory."""

from distnb.features import add

add("commands", "kernel", "distnb.kernels.kernel_spec:KERNEL")
