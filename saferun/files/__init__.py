"""The files of a launch, and the process that alone writes them.

The loop hands over bytes and never waits for a file system. What fails is tried again, what is missing is counted and
said, and no file is reached through a link that another user has planted. What has a similar name here:

``writer_client``, ``writer_process``, ``file_server``
    The supervisor's end of the writer process; the loop of that process; what it does to each file.
``log_files``, ``run_dir``, ``trees``
    The ranks' output; the run directory; directories that are reached from their top one by one.
``file_stream``, ``sinks``
    A file that something is appended to, as the one that writes sees it; the same file in the writer process.
"""
