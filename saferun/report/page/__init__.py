"""report.html: a page about a run in one file, to be read and sent on; and the same as traces for other viewers.

``run_reading`` reads a run directory, ``building`` makes a model of the page of it, ``rendering`` HTML of that.
"""
