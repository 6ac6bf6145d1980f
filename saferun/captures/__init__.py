"""What is captured when ranks hang or crash: one file a capture, and the examiner, which runs them.

A capture is a function that takes a :class:`saferun.captures.scene.Scene`, emits its findings, and returns by the
scene's deadline; failures are values. To add one, write the function and a line in ``CAPTURES`` (``all_captures``).
What has a similar name here:

``examiner``, ``examiner_process``, ``capture_query``, ``capture_processes``
    The supervisor's end of the examiner; that process; one request to it; the children that carry a request out.
``flight_recorder``, ``recorder_dumps``, ``recorder_content``, ``asked_recorders``, ``recorder_waits``
    Of living ranks; of dead ranks; both decoded; of ranks that may be slow, and how much each of them waits.
``stacks``, ``native_stacks``, ``cores``, ``core_reading``
    Of living ranks; of living processes without Python; cores found and kept or deleted; the stacks in one core.
``process_state``, ``waiting``, ``other_ends``
    What /proc has of a process; what it waits for, as a text; whether that is in the job or outside it.
"""
