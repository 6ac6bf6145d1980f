"""What is captured when ranks hang or crash: one file a capture, and the examiner, which runs them.

A capture is a function that takes a :class:`saferun.captures.scene.Scene`, emits its findings, and returns by the
scene's deadline; failures are values. To add one, write the function and a line in ``steps``.
"""
