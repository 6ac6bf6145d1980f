"""What is looked at when ranks hang or crash: one file a capture, and the examiner, which runs them.

A capture is a function that takes a :class:`saferun.captures.scene.Scene`, emits what it finds, and is ready by the
scene's deadline; it fails as a value. To add one, write the function and a line in ``steps``.
"""
