"""The command ``saferun``: its options, the settings file, and what it does with them.

A command line that torchrun takes is taken here with the same meaning; what is wrong with one is said in two lines and
exit code 2, before anything is started or made.
"""
