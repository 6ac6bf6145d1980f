"""Takes away what Pythons of conda and uv lack, which are built against old headers. See tests/without.py."""

import os
import posix
import signal

_LACKING = {
    os: ("pidfd_open", "memfd_create", "MFD_CLOEXEC", "eventfd", "eventfd_read", "eventfd_write", "EFD_CLOEXEC"),
    posix: ("pidfd_open", "memfd_create", "eventfd"),
    signal: ("pidfd_send_signal",),
}
for _module, _names in _LACKING.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
